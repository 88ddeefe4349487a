// A backend of torch.distributed for the device: values go to the host, gloo passes them on, and
// what comes of it is copied back.
//
// A collective waits for its values on the host and hands them to gloo at once, so that all ranks
// do so in the order of their calls. Everything after that happens while the caller goes on. Copies
// out and copies back have a stream each and keep the order of the calls, so that modelled times
// hang neither on gloo nor on the host's threads.
#include "runtime.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include <deque>
#include <map>
#include <mutex>

namespace py = pybind11;
using at::Tensor, c10::Device, c10::Stream, c10::intrusive_ptr, c10::ivalue::Future;
using c10d::OpType, c10d::ReduceOp, c10d::Work, std::chrono::milliseconds;

namespace gcu {
namespace {
using Tensors = std::vector<Tensor>;
using Works = std::vector<intrusive_ptr<Work>>;

// The two ways over the link, of one group and one device.
struct Link {
  Stream out, back;
  explicit Link(Device device) : out(made(device)), back(made(device)) {}
  static Stream made(Device device) {
    return c10::impl::VirtualGuardImpl(kDevice).getStreamFromGlobalPool(device, false);
  }
};

// Copies of one call: `out` at once, `back` when the host is done.
struct Transfer {
  Link link;
  c10::Event sent{kDevice};
  std::vector<std::pair<Tensor, Tensor>> back;  // of the device, and where it lies on the host

  explicit Transfer(const Link& over) : link(over) {
    c10::Event before(kDevice);
    before.record(c10::impl::VirtualGuardImpl(kDevice).getStream(link.out.device()));
    before.block(link.out);
  }
  static Tensor room(int64_t count, const Tensor& like) {
    return at::empty({count}, like.options().device(at::kCPU).pinned_memory(true)
                                  .requires_grad(false));
  }
  void take(const Tensor& here, const Tensor& host) {
    at::AutoDispatchBelowADInplaceOrView no_gradients;
    c10::StreamGuard on(link.out);
    host.view(here.sizes()).copy_(here, true);
  }
  Tensor taken(const Tensor& here) {
    Tensor host = room(here.numel(), here);
    take(here, host);
    return host;
  }
  void bring(const Tensor& here, const Tensor& host) { back.emplace_back(here, host); }
  Tensor brought(const Tensor& here) {
    Tensor host = room(here.numel(), here);
    bring(here, host);
    return host;
  }
  void wait_for_values() {
    sent.record(link.out);
    c10::impl::VirtualGuardImpl(kDevice).synchronizeStream(link.out);
  }
  void copy_back() {
    at::AutoDispatchBelowADInplaceOrView no_gradients;
    sent.block(link.back);
    for (auto& [here, host] : back) {
      here.copy_(host.view(here.sizes()), true);
      record_stream(here.storage().data_ptr(), link.back);
    }
  }
};

// A collective that gloo has been given.
struct Job {
  Transfer transfer;
  Tensors results;
  int divide_by = 1;  // for means, which gloo has not
  std::atomic<size_t> left{0};
  std::mutex mutex;
  std::exception_ptr wrong;
  bool done = false;
  intrusive_ptr<Future> future;

  Job(const Link& link, Tensors made)
      : transfer(link), results(std::move(made)),
        future(c10::make_intrusive<Future>(c10::ListType::create(c10::TensorType::get()),
                                           std::vector<Device>{link.out.device()})) {}

  void finish() {
    if (wrong) return future->setError(wrong);
    try {
      c10::StreamGuard on(transfer.link.back);
      if (divide_by > 1) for (auto& [here, host] : transfer.back) divide(host);
      transfer.copy_back();
      future->markCompleted(c10::IValue(results));
    } catch (...) {
      future->setErrorIfNeeded(std::current_exception());
    }
    transfer.back.clear();
  }
  void divide(Tensor& host) const {
    at::AutoDispatchBelowADInplaceOrView no_gradients;
    if (at::isIntegralType(host.scalar_type(), true)) host.div_(divide_by, "trunc");
    else host.div_(divide_by);
  }
};

// Jobs end in the order in which they began, by whichever thread of gloo sees the first one done.
struct Line {
  std::mutex mutex;
  std::deque<std::shared_ptr<Job>> jobs;
  bool busy = false;

  void settle(Job& job) {
    std::unique_lock<std::mutex> lock(mutex);
    job.done = true;
    if (busy) return;
    busy = true;
    while (!jobs.empty() && jobs.front()->done) {
      auto first = std::move(jobs.front());
      jobs.pop_front();
      lock.unlock();  // what waits for the job may run here, and begin another one
      first->finish();
      lock.lock();
    }
    busy = false;
  }
};

struct CollectiveWork final : Work {
  std::shared_ptr<Job> job;
  Works host;
  CollectiveWork(int rank, OpType type, std::shared_ptr<Job> of, Works by)
      : Work(rank, type), job(std::move(of)), host(std::move(by)) {}
  bool isCompleted() override { return job->future->completed(); }
  bool isSuccess() const override { return job->future->completed() && !job->future->hasError(); }
  std::exception_ptr exception() const override {
    return job->future->completed() && job->future->hasError() ? job->future->exception_ptr()
                                                               : nullptr;
  }
  Tensors result() override { return job->results; }
  intrusive_ptr<Future> getFuture() override { return job->future; }
  void synchronize() override { job->future->waitAndThrow(); }
  bool wait(milliseconds timeout) override {
    for (auto& work : host) work->wait(timeout);
    job->future->waitAndThrow();
    return true;
  }
};

// A message ends when it is waited for: one that comes late must hold up no other.
struct MessageWork final : Work {
  Transfer transfer;
  intrusive_ptr<Work> host;
  c10::Event arrived{kDevice};
  bool ended = false;
  MessageWork(int rank, OpType type, Transfer of, intrusive_ptr<Work> by)
      : Work(rank, type), transfer(std::move(of)), host(std::move(by)) {}
  bool isCompleted() override { return ended || host->isCompleted(); }
  bool isSuccess() const override { return ended || host->isSuccess(); }
  std::exception_ptr exception() const override { return host->exception(); }
  int sourceRank() const override { return host->sourceRank(); }
  void synchronize() override { wait(kNoTimeout); }
  bool wait(milliseconds timeout) override {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!ended) {
      host->wait(timeout);
      c10::StreamGuard on(transfer.link.back);
      transfer.copy_back();
      arrived.record(transfer.link.back);
      ended = true;
    }
    arrived.block(c10::impl::VirtualGuardImpl(kDevice).getStream(transfer.link.back.device()));
    return true;
  }
};

// What moves values only may move bytes: gloo knows a few types.
Tensor bytes(const Tensor& host) { return host.view(at::kByte); }
Tensors bytes(const Tensors& hosts) {
  Tensors made;
  for (const Tensor& host : hosts) made.push_back(bytes(host));
  return made;
}
Tensors pieces(const Tensor& host, int64_t count) {
  Tensors made;
  int64_t size = host.numel() / count;
  for (int64_t i = 0; i < count; i++) made.push_back(host.narrow(0, i * size, size));
  return made;
}

Tensors flat(const std::vector<Tensors>& lists) {
  Tensors made;
  for (const Tensors& list : lists) made.insert(made.end(), list.begin(), list.end());
  return made;
}

class StagedBackend final : public c10d::Backend {
  intrusive_ptr<c10d::Backend> host_;
  std::string name_;
  std::shared_ptr<Line> line_ = std::make_shared<Line>();
  std::mutex mutex_;
  std::map<int, Link> links_;

 public:
  StagedBackend(intrusive_ptr<c10d::Backend> host, std::string name)
      : Backend(host->getRank(), host->getSize()), host_(std::move(host)), name_(std::move(name)) {}
  ~StagedBackend() override {
    if (!Py_IsInitialized() || !PyGILState_Check()) return;
    py::gil_scoped_release others_may_run;  // gloo's threads may be in a function of Python
    host_.reset();
  }
  const std::string getBackendName() const override { return name_; }
  void setSequenceNumberForGroup() override { host_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return host_->getSequenceNumberForGroup(); }
  void setTimeout(milliseconds timeout) override { host_->setTimeout(timeout); }
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool all) override {
    host_->monitoredBarrier(opts, all);
  }
  void abort() override { host_->abort(); }
  void shutdown() override { host_->shutdown(); }

  // -------------------------------------------------------------- collectives
  intrusive_ptr<Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    auto job = begun(tensors);
    Tensors hosts;
    for (const Tensor& here : tensors)
      hosts.push_back(rank_ == opts.rootRank ? job->transfer.taken(here)
                                             : job->transfer.brought(here));
    hosts = bytes(hosts);
    return passed(OpType::BROADCAST, job, [&] { return Works{host_->broadcast(hosts, opts)}; });
  }

  intrusive_ptr<Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    return reduced(OpType::ALLREDUCE, tensors, opts, -1);
  }
  intrusive_ptr<Work> allreduce_coalesced(Tensors& tensors,
                                          const c10d::AllreduceCoalescedOptions& opts) override {
    return reduced(OpType::ALLREDUCE_COALESCED, tensors, opts, -1);
  }
  intrusive_ptr<Work> reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    return reduced(OpType::REDUCE, tensors, opts, opts.rootRank);
  }

  intrusive_ptr<Work> allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                const c10d::AllgatherOptions& opts) override {
    auto job = begun(flat(outputs), {inputs});
    std::vector<Tensors> to, from;
    for (size_t i = 0; i < inputs.size(); i++) {
      from.push_back({bytes(job->transfer.taken(inputs[i]))});
      to.emplace_back();
      for (const Tensor& here : outputs[i]) to[i].push_back(bytes(job->transfer.brought(here)));
    }
    return passed(OpType::ALLGATHER, job, [&] { return gathered(to, from, opts); });
  }
  intrusive_ptr<Work> allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) override {
    // Here the lists are by rank, and tensors in them by input.
    std::vector<Tensors> by_input(inputs.size());
    for (const Tensors& of_rank : outputs)
      for (size_t i = 0; i < inputs.size(); i++) by_input[i].push_back(of_rank.at(i));
    return allgather(by_input, inputs, opts);
  }
  intrusive_ptr<Work> allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                      const c10d::AllgatherOptions& opts) override {
    auto job = begun(outputs, {inputs});
    std::vector<Tensors> to, from;
    for (size_t i = 0; i < inputs.size(); i++) {
      check_sizes(outputs[i].numel(), inputs[i].numel());
      from.push_back({bytes(job->transfer.taken(inputs[i]))});
      to.push_back(pieces(bytes(job->transfer.brought(outputs[i])), size_));
    }
    return passed(OpType::_ALLGATHER_BASE, job, [&] { return gathered(to, from, opts); });
  }
  intrusive_ptr<Work> _allgather_base(Tensor& output, Tensor& input,
                                      const c10d::AllgatherOptions& opts) override {
    Tensors outputs{output}, inputs{input};
    return allgather_into_tensor_coalesced(outputs, inputs, opts);
  }

  intrusive_ptr<Work> gather(std::vector<Tensors>& outputs, Tensors& inputs,
                             const c10d::GatherOptions& opts) override {
    auto job = begun(rank_ == opts.rootRank ? flat(outputs) : inputs, {inputs});
    Tensors from{bytes(job->transfer.taken(inputs.at(0)))};
    std::vector<Tensors> to(outputs.size());
    for (size_t i = 0; i < outputs.size(); i++)
      for (const Tensor& here : outputs[i]) to[i].push_back(bytes(job->transfer.brought(here)));
    return passed(OpType::GATHER, job, [&] { return Works{host_->gather(to, from, opts)}; });
  }
  intrusive_ptr<Work> scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                              const c10d::ScatterOptions& opts) override {
    auto job = begun(outputs, inputs);
    Tensors to{bytes(job->transfer.brought(outputs.at(0)))};
    std::vector<Tensors> from(inputs.size());
    for (size_t i = 0; i < inputs.size(); i++)
      for (const Tensor& here : inputs[i]) from[i].push_back(bytes(job->transfer.taken(here)));
    return passed(OpType::SCATTER, job, [&] { return Works{host_->scatter(to, from, opts)}; });
  }

  // All reduce everything on the host, and each brings its own piece to the device.
  intrusive_ptr<Work> reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                     const c10d::ReduceScatterOptions& opts) override {
    auto job = begun(outputs, inputs);
    Tensors wholes;
    for (size_t i = 0; i < outputs.size(); i++) {
      TORCH_CHECK(inputs.at(i).size() == static_cast<size_t>(size_), "reduce_scatter: ",
                  inputs[i].size(), " tensors for a group of ", size_);
      int64_t whole = 0, at = 0;
      for (const Tensor& here : inputs[i]) whole += here.numel();
      wholes.push_back(Transfer::room(whole, outputs[i]));
      for (int rank = 0; rank < size_; rank++) {
        const Tensor& here = inputs[i][rank];
        Tensor host = wholes[i].narrow(0, at, here.numel());
        job->transfer.take(here, host);
        if (rank == rank_) job->transfer.bring(outputs[i], host);
        at += here.numel();
      }
    }
    return summed(OpType::REDUCE_SCATTER, job, wholes, opts);
  }
  intrusive_ptr<Work> reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) override {
    auto job = begun(outputs, {inputs});
    Tensors wholes;
    for (size_t i = 0; i < outputs.size(); i++) {
      check_sizes(inputs.at(i).numel(), outputs[i].numel());
      wholes.push_back(job->transfer.taken(inputs[i]));
      job->transfer.bring(outputs[i], pieces(wholes[i], size_)[rank_]);
    }
    return summed(OpType::_REDUCE_SCATTER_BASE, job, wholes, opts);
  }
  intrusive_ptr<Work> _reduce_scatter_base(Tensor& output, Tensor& input,
                                           const c10d::ReduceScatterOptions& opts) override {
    Tensors outputs{output}, inputs{input};
    return reduce_scatter_tensor_coalesced(outputs, inputs, opts);
  }

  intrusive_ptr<Work> alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& to,
                                    std::vector<int64_t>& from,
                                    const c10d::AllToAllOptions& opts) override {
    auto job = begun({output}, {{input}});
    Tensor target = bytes(job->transfer.brought(output)), source = bytes(job->transfer.taken(input));
    auto sizes = [&](const std::vector<int64_t>& rows, const Tensor& here, const Tensor& host) {
      if (rows.empty()) check_sizes(host.numel(), host.numel() / size_);
      std::vector<int64_t> made(size_, host.numel() / size_);
      int64_t row = here.dim() && here.size(0) ? host.numel() / here.size(0) : 0;
      for (size_t i = 0; i < rows.size(); i++) made.at(i) = rows[i] * row;
      return made;
    };
    return exchanged(OpType::ALLTOALL_BASE, job, target, source, sizes(to, output, target),
                     sizes(from, input, source), opts);
  }
  intrusive_ptr<Work> alltoall(Tensors& outputs, Tensors& inputs,
                               const c10d::AllToAllOptions& opts) override {
    auto job = begun(outputs, {inputs});
    auto laid_out = [&](const Tensors& tensors, std::vector<int64_t>& sizes, bool out) {
      int64_t whole = 0, at = 0;
      for (const Tensor& here : tensors) whole += here.numel();
      Tensor host = Transfer::room(whole, tensors.at(0));
      for (const Tensor& here : tensors) {
        Tensor part = host.narrow(0, at, here.numel());
        out ? job->transfer.take(here, part) : job->transfer.bring(here, part);
        sizes.push_back(here.nbytes());
        at += here.numel();
      }
      return bytes(host);
    };
    std::vector<int64_t> to, from;
    Tensor target = laid_out(outputs, to, false), source = laid_out(inputs, from, true);
    return exchanged(OpType::ALLTOALL, job, target, source, to, from, opts);
  }

  intrusive_ptr<Work> barrier(const c10d::BarrierOptions& opts) override {
    auto index = opts.device ? opts.device->index()
                 : opts.device_ids.empty() ? -1 : opts.device_ids[0];
    auto job = std::make_shared<Job>(
        link(Device(kDevice, given(static_cast<c10::DeviceIndex>(index)))), Tensors{});
    return passed(OpType::BARRIER, job, [&] { return Works{host_->barrier(opts)}; });
  }

  // -------------------------------------------------------------- messages
  intrusive_ptr<Work> send(Tensors& tensors, int to, int tag) override {
    Transfer transfer(link(one_device(tensors)));
    Tensors hosts{bytes(transfer.taken(tensors.at(0)))};
    transfer.wait_for_values();
    auto passed = host_->send(hosts, to, tag);
    return c10::make_intrusive<MessageWork>(rank_, OpType::SEND, std::move(transfer), passed);
  }
  intrusive_ptr<Work> recv(Tensors& tensors, int from, int tag) override {
    return received(OpType::RECV, tensors, [&](Tensors& hosts) { return host_->recv(hosts, from, tag); });
  }
  intrusive_ptr<Work> recvAnysource(Tensors& tensors, int tag) override {
    return received(OpType::RECVANYSOURCE, tensors,
                    [&](Tensors& hosts) { return host_->recvAnysource(hosts, tag); });
  }

 private:
  Device one_device(const Tensors& tensors, const std::vector<Tensors>& others = {}) const {
    TORCH_CHECK(!tensors.empty(), name_, ": a call without tensors");
    Device device = tensors[0].device();
    auto check_here = [&](const Tensor& tensor) {
      TORCH_CHECK(tensor.device().type() == kDevice && tensor.device() == device &&
                      tensor.layout() == at::kStrided,
                  name_, ": tensors of a call must be dense and on one device, got one on ",
                  tensor.device(), " and one on ", device);
    };
    for (const Tensor& tensor : tensors) check_here(tensor);
    for (const Tensors& more : others) for (const Tensor& tensor : more) check_here(tensor);
    return device;
  }
  const Link& link(Device device) {
    std::lock_guard<std::mutex> lock(mutex_);
    return links_.try_emplace(device.index(), device).first->second;
  }
  void check_sizes(int64_t whole, int64_t piece) const {
    TORCH_CHECK(whole == piece * size_, name_, ": a tensor of ", whole, " values is not ", size_,
                " times one of ", piece);
  }

  std::shared_ptr<Job> begun(const Tensors& results, const std::vector<Tensors>& inputs = {}) {
    return std::make_shared<Job>(link(one_device(results, inputs)), results);
  }

  template <typename Start>
  intrusive_ptr<Work> passed(OpType type, const std::shared_ptr<Job>& job, Start start) {
    job->transfer.wait_for_values();
    Works works;
    {
      std::lock_guard<std::mutex> lock(line_->mutex);
      works = start();
      job->left = works.size();
      line_->jobs.push_back(job);
    }
    for (auto& work : works)
      work->getFuture()->addCallback([job, line = line_](Future& ended) {
        if (ended.hasError()) {
          std::lock_guard<std::mutex> lock(job->mutex);
          job->wrong = ended.exception_ptr();
        }
        if (--job->left == 0) line->settle(*job);
      });
    return c10::make_intrusive<CollectiveWork>(rank_, type, job, std::move(works));
  }

  // What gloo is to do for a reduction: means are sums that are divided in the end, and factors are
  // multiplied with before.
  ReduceOp on_host(const ReduceOp& asked, Job& job, Tensors& hosts) const {
    if (asked == ReduceOp::AVG) {
      job.divide_by = size_;
      return ReduceOp::SUM;
    }
    if (asked == ReduceOp::PREMUL_SUM) {
      auto* factor = static_cast<c10d::NCCLPreMulSumSupplement*>(asked.supplement_.get());
      at::AutoDispatchBelowADInplaceOrView no_gradients;
      double by = factor->tensor_factor.defined() ? factor->tensor_factor.item<double>()
                                                  : factor->double_factor;
      for (Tensor& host : hosts) host.mul_(by);
      return ReduceOp::SUM;
    }
    return asked;
  }

  template <typename Options>
  intrusive_ptr<Work> reduced(OpType type, Tensors& tensors, const Options& opts, int64_t root) {
    auto job = begun(tensors);
    Tensors hosts;
    for (const Tensor& here : tensors) {
      hosts.push_back(job->transfer.taken(here));
      if (root < 0 || root == rank_) job->transfer.bring(here, hosts.back());
    }
    return root < 0 ? summed(type, job, hosts, opts) : passed(type, job, [&] {
      c10d::ReduceOptions ours;
      ours.reduceOp = on_host(opts.reduceOp, *job, hosts);
      ours.rootRank = root;
      ours.timeout = opts.timeout;
      return Works{host_->reduce(hosts, ours)};
    });
  }

  template <typename Options>
  intrusive_ptr<Work> summed(OpType type, const std::shared_ptr<Job>& job, Tensors& hosts,
                             const Options& opts) {
    return passed(type, job, [&] {
      c10d::AllreduceOptions ours;
      ours.reduceOp = on_host(opts.reduceOp, *job, hosts);
      ours.timeout = opts.timeout;
      Works works;
      for (const Tensor& host : hosts) {
        Tensors one{host};
        works.push_back(host_->allreduce(one, ours));
      }
      return works;
    });
  }

  Works gathered(std::vector<Tensors>& to, std::vector<Tensors>& from,
                 const c10d::AllgatherOptions& opts) {
    Works works;
    for (size_t i = 0; i < from.size(); i++) {
      std::vector<Tensors> one{to[i]};
      works.push_back(host_->allgather(one, from[i], opts));
    }
    return works;
  }

  intrusive_ptr<Work> exchanged(OpType type, const std::shared_ptr<Job>& job, Tensor& target,
                                Tensor& source, std::vector<int64_t> to, std::vector<int64_t> from,
                                const c10d::AllToAllOptions& opts) {
    return passed(type, job, [&] {
      return Works{host_->alltoall_base(target, source, to, from, opts)};
    });
  }

  template <typename Start>
  intrusive_ptr<Work> received(OpType type, Tensors& tensors, Start start) {
    Transfer transfer(link(one_device(tensors)));
    Tensors hosts{bytes(transfer.brought(tensors.at(0)))};
    transfer.sent.record(transfer.link.out);
    return c10::make_intrusive<MessageWork>(rank_, type, std::move(transfer), start(hosts));
  }
};
}  // namespace

void bind_distributed(py::module_& m) {
  m.def("staged_backend",
        [](intrusive_ptr<c10d::Backend> host, std::string name) -> intrusive_ptr<c10d::Backend> {
          return c10::make_intrusive<StagedBackend>(std::move(host), std::move(name));
        });
}

}  // namespace gcu

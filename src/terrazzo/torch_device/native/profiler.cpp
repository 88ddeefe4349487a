// torch.profiler with the device: what ran on it, by its modelled clock, beside what the host did.
//
// Kineto takes plugins for devices of others (2.13 on). The runtime library keeps a record of each
// kernel, copy and fill, with a tag of the thread that launched it: the operator and the region
// (record_function) that it was in. Device rows of a trace are on the modelled clock, from the
// beginning of the profile on: lengths, order and gaps there are the chip's, not the host's.
// Without kineto, operators are timed by events.
#define USE_KINETO
#define FMT_HEADER_ONLY
#define KINETO_NAMESPACE libkineto
#include "runtime.h"

#include <c10/util/ApproximateClock.h>
#include <torch/csrc/profiler/stubs/base.h>
#if __has_include(<torch/csrc/profiler/standalone/privateuse1_profiler.h>)
#define GCU_KINETO
#include <libkineto.h>
#include <output_base.h>
#include <torch/csrc/profiler/standalone/privateuse1_profiler.h>
#endif

#include <map>
#include <mutex>
#include <set>

namespace gcu {
namespace {
struct Stubs final : torch::profiler::impl::ProfilerStubs {
  using Event = torch::profiler::impl::ProfilerVoidEventStub;
  void record(c10::DeviceIndex* device, Event* event, int64_t* cpu_ns) const override {
    c10::DeviceIndex here = current_device();
    if (device) *device = here;
    gcuEvent_t made = nullptr;
    check(library().gcuEventCreate(&made));
    *event = Event(made, [](void* old) { library().gcuEventDestroy(static_cast<gcuEvent_t>(old)); });
    if (cpu_ns) *cpu_ns = c10::getTime();
    check(library().gcuEventRecord(made, handle(current_stream(here))));
  }
  float elapsed(const Event* start, const Event* end) const override {
    float milliseconds = 0;
    if (!*start || !*end) return 0;
    check(library().gcuEventSynchronize(static_cast<gcuEvent_t>(end->get())));
    check(library().gcuEventElapsedTime(&milliseconds, static_cast<gcuEvent_t>(start->get()),
                                        static_cast<gcuEvent_t>(end->get())));
    return milliseconds * 1000;
  }
  void mark(const char*) const override {}
  void rangePush(const char*) const override {}
  void rangePop() const override {}
  bool enabled() const override { return true; }
  void onEachDevice(std::function<void(int)> action) const override {
    for (int device = 0; device < device_count(); device++) {
      OnDevice on(device);
      action(device);
    }
  }
  void synchronize() const override { check(library().gcuDeviceSynchronize()); }
};
[[maybe_unused]] const bool registered = [] {
  torch::profiler::impl::registerPrivateUse1Methods(new Stubs);
  return true;
}();

#ifdef GCU_KINETO
using libkineto::ActivityType, libkineto::GenericTraceActivity;

std::atomic<int64_t> session_number{0};  // odd: one is under way

// Which operator and which region this thread is in, by kineto's numbers.
struct Place {
  int64_t session = 0;
  std::vector<uint64_t> operators, regions;
  static Place& now() {
    static thread_local Place place;
    int64_t number = session_number;
    if (place.session != number) place = {number, {}, {}};
    return place;
  }
  static uint64_t last(const std::vector<uint64_t>& of) { return of.empty() ? 0 : of.back(); }
  void tell() const {
    if (is_ready())
      library().gcuTraceTag(int64_t(last(regions) << 32 | (last(operators) & 0xffffffff)));
  }
};

struct Session final : libkineto::IActivityProfilerSession {
  std::vector<gcuRecord> records;
  std::mutex mutex;
  std::map<uint64_t, uint64_t> outer;  // the region around a region
  std::unique_ptr<libkineto::CpuTraceBuffer> buffer = std::make_unique<libkineto::CpuTraceBuffer>();

  ~Session() override { if (session_number % 2) stop(); }
  void start() override {
    session_number += session_number % 2 ? 2 : 1;
    if (is_ready()) {
      wait_for_devices();  // what was launched before is no part of the profile
      check(library().gcuTraceStart());
    }
    status_ = libkineto::TraceStatus::RECORDING;
  }
  void stop() override {
    if (session_number % 2) session_number++;
    if (!is_ready()) return;
    wait_for_devices();
    library().gcuTraceStop();
    std::vector<gcuRecord> some(256);
    for (int count = 1; count;) {
      check(library().gcuTraceRead(some.data(), int(some.size()), &count));
      records.insert(records.end(), some.begin(), some.begin() + count);
    }
    status_ = libkineto::TraceStatus::PROCESSING;
  }

  static void wait_for_devices() {
    for (int device = 0; device < device_count(); device++) {
      OnDevice on(device);
      library().gcuDeviceSynchronize();  // what failed there says so to its own callers
    }
  }

  void pushCorrelationId(uint64_t id) override { change(&Place::operators, id); }
  void popCorrelationId() override { change(&Place::operators, 0); }
  void pushUserCorrelationId(uint64_t id) override {
    uint64_t around = Place::last(Place::now().regions);
    {
      std::lock_guard<std::mutex> lock(mutex);
      outer[id] = around;
    }
    change(&Place::regions, id);
  }
  void popUserCorrelationId() override { change(&Place::regions, 0); }
  static void change(std::vector<uint64_t> Place::*which, uint64_t id) {
    Place& place = Place::now();
    if (id) (place.*which).push_back(id);
    else if (!(place.*which).empty()) (place.*which).pop_back();
    place.tell();
  }

  std::vector<std::string> errors() override { return {}; }
  std::unique_ptr<libkineto::DeviceInfo> getDeviceInfo() override { return nullptr; }
  std::vector<libkineto::ResourceInfo> getResourceInfos() override { return {}; }
  std::unique_ptr<libkineto::CpuTraceBuffer> getTraceBuffer() override { return std::move(buffer); }
  void processTrace(libkineto::ActivityLogger& logger) override {
    processTrace(logger, [](int32_t) { return nullptr; }, 0, 0);
  }
  void processTrace(libkineto::ActivityLogger& logger, libkineto::getLinkedActivityCallback linked,
                    int64_t begin, int64_t end) override;

 private:
  struct Clock {
    int64_t kilohertz, first, begin;  // cycles, and nanoseconds of the host
    int64_t at(int64_t cycles) const {
      return begin + int64_t(double(cycles - first) * 1e6 / double(kilohertz));
    }
  };
  GenericTraceActivity& add(ActivityType type, const std::string& name, const gcuRecord& record,
                            const Clock& clock) {
    buffer->emplace_activity(buffer->span, type, name);
    GenericTraceActivity& made = *buffer->activities.back();
    made.startTime = clock.at(record.start);
    made.endTime = clock.at(record.start + record.cycles);
    made.device = record.device;
    made.resource = int32_t(record.stream);
    made.id = int32_t(record.correlation);
    made.addMetadata("device", record.device);
    made.addMetadata("stream", record.stream);
    return made;
  }
  void add_regions(const gcuRecord& record, std::map<std::array<int64_t, 3>, gcuRecord>& spans) {
    for (uint64_t id = uint64_t(record.tag) >> 32; id; id = outer[id]) {
      auto [found, is_new] = spans.try_emplace({int64_t(id), record.device, record.stream}, record);
      int64_t end = std::max(found->second.start + found->second.cycles,
                             record.start + record.cycles);
      found->second.start = std::min(found->second.start, record.start);
      found->second.cycles = end - found->second.start;
    }
  }
};

constexpr ActivityType kTypes[] = {ActivityType::CONCURRENT_KERNEL, ActivityType::GPU_MEMCPY,
                                   ActivityType::GPU_MEMSET};
constexpr const char* kCounts[] = {"vector cycles", "matrix cycles", "scalar cycles",
                                   "bytes loaded", "bytes stored", "scratchpad bytes", "transfers"};

void Session::processTrace(libkineto::ActivityLogger& logger,
                           libkineto::getLinkedActivityCallback linked, int64_t begin, int64_t end) {
  if (records.empty()) return;
  gcuDeviceProperties chip{};
  check(library().gcuGetDeviceProperties(&chip, 0));
  Clock clock{chip.description.clock_khz, records[0].start, begin};
  for (const gcuRecord& record : records) clock.first = std::min(clock.first, record.start);
  buffer->span = libkineto::TraceSpan(begin, end, "__gcu_profiler__");
  std::map<std::array<int64_t, 3>, gcuRecord> spans;
  std::set<std::pair<int64_t, int64_t>> rows;
  for (const gcuRecord& record : records) {
    auto& made = add(kTypes[record.kind], record.name, record, clock);
    made.linked = linked(int32_t(record.tag & 0xffffffff));
    made.addMetadata("correlation", record.correlation);
    made.addMetadata("External id", record.tag & 0xffffffff);
    made.addMetadata("cycles", record.cycles);
    if (record.kind != gcuRecordKernel) made.addMetadata("bytes", record.bytes);
    else {
      made.addMetadata("programs", record.programs);
      made.addMetadata("units", record.units);
      for (size_t i = 0; i < std::size(kCounts); i++) made.addMetadata(kCounts[i], record.counts[i]);
    }
    add_regions(record, spans);
    rows.emplace(record.device, record.stream);
  }
  for (auto& [key, span] : spans)
    if (const auto* region = linked(int32_t(key[0]))) {
      span.correlation = key[0];
      add(ActivityType::GPU_USER_ANNOTATION, region->name(), span, clock);
    }
  for (auto& activity : buffer->activities) activity->log(logger);
  const std::string name = chip.description.name;
  for (auto [device, stream] : rows)  // kineto names processes itself, by numbers
    logger.handleResourceInfo({stream, stream, device, name + ":" + std::to_string(device) +
                               ", stream " + std::to_string(stream) + ", modelled time"}, begin);
}

struct Profiler final : libkineto::IActivityProfiler {
  const std::string called = "gcu";
  const std::set<ActivityType> kinds{ActivityType::CONCURRENT_KERNEL, ActivityType::GPU_MEMCPY,
                                     ActivityType::GPU_MEMSET, ActivityType::GPU_USER_ANNOTATION};
  const std::string& name() const override { return called; }
  const std::set<ActivityType>& availableActivities() const override { return kinds; }
  std::unique_ptr<libkineto::IActivityProfilerSession> configure(
      const std::set<ActivityType>& wanted, const libkineto::Config&) override {
    if (!wanted.count(ActivityType::CONCURRENT_KERNEL)) return nullptr;
    return std::make_unique<Session>();
  }
  std::unique_ptr<libkineto::IActivityProfilerSession> configure(
      int64_t, int64_t, const std::set<ActivityType>& wanted,
      const libkineto::Config& config) override {
    return configure(wanted, config);
  }
};
REGISTER_PRIVATEUSE1_PROFILER(Profiler);
#endif
}  // namespace

// The device is loaded while a profile is under way: it begins to keep records then.
void profile_if_asked() {
#ifdef GCU_KINETO
  if (session_number % 2) check(library().gcuTraceStart());
#endif
}

}  // namespace gcu

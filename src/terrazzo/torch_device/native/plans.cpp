// Operators that are compiled for the chip: a plan is found by what a call looks like, and launched.
//
// Python is asked (operators.py) when a call is the first of its kind: the operator, and types,
// sizes and strides of its tensors. Numbers among the arguments are no part of that: plans are made
// for the first few that come, and then one that reads them when it runs.
#include "runtime.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <list>
#include <memory>
#include <mutex>
#include <unordered_map>

namespace py = pybind11;
using at::Tensor, c10::IValue;

namespace gcu {
namespace {
constexpr size_t kExact = 2;         // plans for numbers as they are, before one that reads them
constexpr size_t kMostExact = 64;    // where none can read them
constexpr size_t kMostPlans = 4096;  // those used longest ago go: about 40 KB each
constexpr int64_t kCells = 1 << 15;  // numbers that may be on their way to a device

struct Output {
  std::vector<int64_t> size, stride;
  at::ScalarType dtype;
  int target;   // the tensor of the call that it goes to; -1: a new one
  bool direct;  // whether it may be written there at once
};

struct Plan {
  intptr_t function;  // 0: there is nothing to compute, as all outputs are empty
  std::vector<int> inputs;                // tensors of the call; ~n: its number n
  std::vector<at::ScalarType> numbers;    // the types in which the code reads numbers
  std::vector<Output> outputs;
  std::vector<std::pair<char, int>> returns;  // 'o': an output, 't': a tensor of the call, 'n': none
  int64_t arena;
  bool reads_numbers;
  py::object owner;
};

using Kept = std::shared_ptr<Plan>;  // none: the CPU has to do it

struct Family {
  std::vector<std::pair<std::vector<int64_t>, Kept>> exact;  // by the bits of numbers
  Kept any;
  bool may_read = true;
  std::list<const std::string*>::iterator turn;
  size_t size() const { return exact.size() + (any != nullptr); }
};

std::mutex mutex;
// Never deleted: what plans own is Python's, which ends first.
auto& families = *new std::unordered_map<std::string, Family>;
auto& turns = *new std::list<const std::string*>;  // their keys, that used longest ago first
size_t plan_count = 0, most_plans = kMostPlans;
py::object* compiler = nullptr;

Family& family_of(const std::string& key) {
  auto [found, is_new] = families.try_emplace(key);
  Family& family = found->second;
  if (is_new) family.turn = turns.insert(turns.end(), &found->first);
  else turns.splice(turns.end(), turns, family.turn);
  return family;
}

// Takes out what is too many, for the caller to drop when the lock has been given back: that
// waits for Python. What is queued of a plan still runs.
std::vector<Family> taken_out() {
  std::vector<Family> gone;
  while (plan_count > most_plans && turns.size() > 1) {
    auto oldest = families.find(*turns.front());
    plan_count -= oldest->second.size();
    turns.pop_front();
    gone.push_back(std::move(oldest->second));
    families.erase(oldest);
  }
  return gone;
}

// What a call looks like: its key, and the tensors and numbers in the order of the arguments.
struct Call {
  std::string key;
  c10::SmallVector<const Tensor*, 8> tensors;
  std::vector<int64_t> numbers;
  c10::SmallVector<bool, 4> whole;  // of each number: an integer, else a float
  bool is_ours = true;

  template <typename T> void put(T value) {
    key.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  void number(double value) {
    int64_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    numbers.push_back(bits);
    whole.push_back(false);
    put('d');
  }
  void number(int64_t value) {
    numbers.push_back(value);
    whole.push_back(true);
    put('i');
  }
  void add(const Tensor& tensor) {
    if (!tensor.defined()) return put('u');
    if (tensor.is_cpu() && tensor.dim() == 0) return add_host(tensor);
    if (tensor.device().type() != kDevice || tensor.layout() != at::kStrided ||
        tensor.is_conj() || tensor.is_neg()) {
      is_ours = false;
      return;
    }
    put('t');
    put(tensor.scalar_type());
    put(static_cast<char>(tensor.dim()));
    key.append(reinterpret_cast<const char*>(tensor.sizes().data()), 8 * tensor.dim());
    key.append(reinterpret_cast<const char*>(tensor.strides().data()), 8 * tensor.dim());
    tensors.push_back(&tensor);
  }
  void add_host(const Tensor& tensor) {
    put(tensor.unsafeGetTensorImpl()->is_wrapped_number() ? 'w' : 'h');
    put(tensor.scalar_type());
    if (at::isFloatingType(tensor.scalar_type())) number(tensor.item<double>());
    else if (at::isComplexType(tensor.scalar_type())) is_ours = false;
    else number(tensor.item<int64_t>());
  }
  void add(const IValue& value, bool is_number) {
    if (value.isTensor()) add(value.toTensor());
    else if (value.isNone()) put('z');
    else if (value.isDouble()) number(value.toDouble());
    else if (value.isInt() && is_number) number(value.toInt());
    else if (value.isInt()) put('I'), put(value.toInt());
    else if (value.isBool()) put(value.toBool() ? 'T' : 'F');
    else if (value.isList()) {
      put('['), put(value.toListRef().size());
      for (const IValue& part : value.toListRef()) add(part, is_number);
    } else if (value.isString()) put('s'), key += value.toStringRef(), put('\0');
    else if (value.isDevice()) put('D'), put(value.toDevice().type()), put(value.toDevice().index());
    else is_ours = false;
  }
};

bool is_number(const c10::Argument& argument) {
  auto type = argument.type();
  if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  return type->kind() == c10::TypeKind::NumberType;
}

// ---------------------------------------------------------------- plans that are made
py::object python_of(const IValue& value) {
  if (value.isTensor() && value.toTensor().defined() &&
      value.toTensor().unsafeGetTensorImpl()->is_wrapped_number())
    return torch::jit::toPyObject(value.toTensor().item());
  return torch::jit::toPyObject(value);
}

// While it is there, dynamo leaves the frames of this thread alone: an operator may be called first
// between the graphs of a compiled function, and our compiler is no part of that.
struct Untraced {
  py::object set = py::module_::import("torch._C._dynamo.eval_frame").attr("set_eval_frame");
  py::object before = set(py::none());
  ~Untraced() { set(before); }
};

Kept made(const c10::OperatorHandle& op, const Call& call, at::ArrayRef<IValue> arguments,
           bool reads_numbers) {
  py::gil_scoped_acquire gil;
  try {
    py::list given;
    for (const IValue& value : arguments) given.append(python_of(value));
    const auto& name = op.operator_name();
    Untraced untraced;
    py::object answer = (*compiler)(name.name, name.overload_name, given, reads_numbers);
    if (answer.is_none()) return nullptr;
    return Kept(new Plan(answer.cast<Plan&>()), [](Plan* plan) {
      py::gil_scoped_acquire gil;
      delete plan;
    });
  } catch (py::error_already_set& error) {
    error.restore();
    python_error raised;
    raised.persist();
    throw raised;
  }
}

Kept found(const c10::OperatorHandle& op, const Call& call, at::ArrayRef<IValue> arguments) {
  bool reads = false;
  {
    std::lock_guard<std::mutex> lock(mutex);
    Family& family = family_of(call.key);
    if (family.any) return family.any;
    for (auto& [numbers, plan] : family.exact)
      if (numbers == call.numbers) return plan;
    reads = family.may_read && family.exact.size() >= kExact;
    if (family.exact.size() >= kMostExact) return nullptr;
  }
  Kept plan = made(op, call, arguments, reads);
  bool does_read = plan && plan->reads_numbers;
  if (reads && !plan) plan = made(op, call, arguments, false);
  std::vector<Family> gone;  // dropped after the lock
  std::lock_guard<std::mutex> lock(mutex);
  Family& family = family_of(call.key);
  if (reads && !does_read) family.may_read = false;
  if (does_read && family.any) return family.any;  // another thread was quicker
  if (does_read) family.any = plan;
  else family.exact.emplace_back(call.numbers, plan);
  plan_count++;
  gone = taken_out();
  return plan;
}

// ---------------------------------------------------------------- launches
// Numbers lie in memory of the device that the host writes before the launch. Cells are used in
// turn; when all have been, the device is waited for.
int64_t* cells(int device, size_t count) {
  static std::array<int64_t*, kMostDevices> rings{};
  static std::array<int64_t, kMostDevices> next{};
  if (!rings[device]) {
    void* pointer = nullptr;
    check(library().gcuMalloc(&pointer, kCells * 8));
    rings[device] = static_cast<int64_t*>(pointer);
  }
  if (next[device] + static_cast<int64_t>(count) > kCells) {
    check(library().gcuDeviceSynchronize());
    next[device] = 0;
  }
  int64_t* taken = rings[device] + next[device];
  next[device] += count;
  return taken;
}

void write_number(int64_t* cell, int64_t bits, bool whole, at::ScalarType type) {
  double value;
  std::memcpy(&value, &bits, sizeof value);
  if (whole) value = static_cast<double>(bits);
  if (type == at::kDouble) std::memcpy(cell, &value, 8);
  else if (type == at::kFloat) { float f = static_cast<float>(value); std::memcpy(cell, &f, 4); }
  else *cell = whole ? bits : static_cast<int64_t>(value);
}

// Where a tensor lies; one without elements lies nowhere, and code reads nothing of it.
int64_t address_of(const Tensor& tensor) {
  if (tensor.numel()) return reinterpret_cast<int64_t>(tensor.data_ptr());
  std::lock_guard<std::mutex> lock(mutex);
  return reinterpret_cast<int64_t>(cells(tensor.get_device(), 0));
}

bool is_same(const Tensor& a, const Tensor& b) {
  return a.data_ptr() == b.data_ptr() && a.sizes() == b.sizes() && a.strides() == b.strides();
}

// Whether something else that the plan reads lies where it would write.
bool is_in_the_way(const Plan& plan, const Call& call, const Tensor& target) {
  for (int i : plan.inputs)
    if (i >= 0 && call.tensors[i]->storage().is_alias_of(target.storage()) &&
        !is_same(*call.tensors[i], target))
      return true;
  return false;
}

void launch(const Plan& plan, const Call& call, c10::ArrayRef<int64_t> given, int device) {
  c10::SmallVector<int64_t, 16> slots(given.begin(), given.end());
  auto arena = allocator()->allocate(plan.arena);
  std::unique_lock<std::mutex> lock;
  if (!plan.numbers.empty()) {  // nobody may take these cells before the launch
    lock = std::unique_lock<std::mutex>(mutex);
    int64_t* cell = cells(device, plan.numbers.size());
    auto type = plan.numbers.begin();
    for (size_t n = 0; n < plan.inputs.size(); n++) {
      if (plan.inputs[n] >= 0) continue;
      size_t number = ~plan.inputs[n];
      write_number(cell, call.numbers[number], call.whole[number], *type++);
      slots[n] = reinterpret_cast<int64_t>(cell++);
    }
  }
  check(library().gcuLaunchPlan(reinterpret_cast<gcuFunction_t>(plan.function), slots.data(),
                                slots.size(), arena.get(), handle(current_stream(device))));
}

void run(const Plan& plan, const Call& call, torch::jit::Stack* stack, size_t arguments) {
  auto device = call.tensors[0]->device();
  OnDevice on(device.index());
  c10::SmallVector<int64_t, 16> slots;
  c10::SmallVector<Tensor, 4> results;
  for (int i : plan.inputs) slots.push_back(i < 0 ? 0 : address_of(*call.tensors[i]));
  for (const Output& output : plan.outputs) {
    if (output.target >= 0 && output.direct &&
        !is_in_the_way(plan, call, *call.tensors[output.target]))
      results.push_back(*call.tensors[output.target]);
    else
      results.push_back(at::detail::empty_strided_generic(
          output.size, output.stride, allocator(),
          c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), output.dtype));
    slots.push_back(address_of(results.back()));
  }
  slots.push_back(0);  // the library's place for counts
  if (plan.function) launch(plan, call, slots, device.index());
  for (size_t i = 0; i < results.size(); i++) {
    int target = plan.outputs[i].target;
    if (target < 0 || results[i].is_same(*call.tensors[target])) continue;
    const Tensor& there = *call.tensors[target];
    if (there.sizes() == results[i].sizes()) there.copy_(results[i]);
    else there.set_(results[i].storage(), 0, results[i].sizes(), results[i].strides());
  }
  torch::jit::Stack answers;
  for (auto [kind, i] : plan.returns)
    answers.emplace_back(kind == 'o' ? results[i] : kind == 't' ? *call.tensors[i] : Tensor());
  torch::jit::drop(*stack, arguments);
  for (IValue& answer : answers) stack->push_back(std::move(answer));
}
}  // namespace

bool run_compiled(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  if (!compiler) return false;
  const auto& schema = op.schema().arguments();
  auto arguments = torch::jit::last(*stack, schema.size());
  Call call;
  call.key.reserve(256);
  call.put(&op.schema());
  for (size_t i = 0; i < schema.size() && call.is_ours; i++)
    call.add(arguments[i], is_number(schema[i]));
  if (!call.is_ours || call.tensors.empty()) return false;
  for (const Tensor* tensor : call.tensors)
    if (tensor->device() != call.tensors[0]->device()) return false;
  Kept plan = found(op, call, arguments);
  if (!plan) return false;
  run(*plan, call, stack, schema.size());
  return true;
}

void bind_plans(py::module_& m) {
  py::class_<Plan>(m, "Plan").def(py::init(
      [](intptr_t function, std::vector<int> inputs, std::vector<py::object> numbers,
         const std::vector<std::tuple<std::vector<int64_t>, std::vector<int64_t>, py::object, int,
                                      bool>>& outputs,
         std::vector<std::pair<char, int>> returns, int64_t arena, bool reads_numbers,
         py::object owner) {
        auto type = [](const py::object& dtype) {
          return reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type;
        };
        Plan plan{function, std::move(inputs), {}, {}, std::move(returns), arena, reads_numbers,
                  std::move(owner)};
        for (auto& number : numbers) plan.numbers.push_back(type(number));
        for (auto& [size, stride, dtype, target, direct] : outputs)
          plan.outputs.push_back({size, stride, type(dtype), target, direct});
        return plan;
      }));
  m.def("plan_count", [] {
    std::lock_guard<std::mutex> lock(mutex);
    return plan_count;
  });
  m.def("limit_plans", [](size_t most) {
    std::lock_guard<std::mutex> lock(mutex);
    return std::exchange(most_plans, most);
  });
  m.def("set_compiler", [](py::object function) { compiler = new py::object(std::move(function)); });
}

}  // namespace gcu

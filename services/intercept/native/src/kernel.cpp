// The kernels of operators that Python has taught: they record a call as Python would (`wooly.kernels.generic`), with the same
// program as the result. A kernel starts without knowledge. It gives each call that it does not know to the kernel in Python, and
// Python then teaches it the plan of the call's signature (`learn`). Whatever is unusual also goes to the kernel in Python: a
// captured graph, an observer of memory, another thread that holds the recorder's lock, no room for the result.
#define PY_SSIZE_T_CLEAN
#include <atomic>
#include <limits>
#include <memory>
#include <unordered_map>

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include "recording.h"

namespace wooly {
namespace {

using torch::jit::Stack;

// Maximum number of plans of all kernels; at this number all are forgotten (`wooly.kernels.generic._MAX_PLANS`).
constexpr size_t kMaxPlans = 65536;

struct Learned {
  std::vector<int64_t> key;
  std::unique_ptr<Plan> plan; // null: only Python may handle calls with this signature
};

std::atomic<bool> enabled{true};
uint64_t epoch = 0; // grows when all plans are forgotten
size_t n_plans = 0;

// Counters for tests and benchmarks: calls that were recorded here, and calls that Python handled. Under the interpreter lock.
unsigned long long n_native = 0, n_python = 0;

// What Python has taught one kernel, by signature.
class Known {
 public:
  // Returns null if the signature is not known. The caller holds the interpreter lock.
  const Learned* find(const Signature& s) {
    if (epoch_ != epoch) {
      plans_.clear();
      epoch_ = epoch;
    }
    auto found = plans_.find(s.hash());
    if (found == plans_.end() || found->second.key.size() != s.key.size() ||
        !std::equal(s.key.begin(), s.key.end(), found->second.key.begin())) {
      return nullptr;
    }
    return &found->second;
  }

  Learned& add(const Signature& s) {
    Learned& learned = plans_[s.hash()];
    learned.key.assign(s.key.begin(), s.key.end());
    learned.plan = nullptr;
    ++n_plans;
    return learned;
  }

 private:
  std::unordered_map<uint64_t, Learned> plans_;
  uint64_t epoch_ = 0;
};

// A call that the kernel in Python handles now, and that Python may teach.
struct Pending {
  const Facts* facts;
  const Signature* signature;
  Known* known;
  bool armed;
};

thread_local std::vector<Pending> pending;

// Let the kernel in Python handle a call. Without `teach` too, the call is noted, so that Python does not teach an outer call of
// the same operator.
void call_python(const c10::SafeKernelFunction& python, const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack,
                 Pending call) {
  {
    Gil gil;
    ++n_python;
  }
  pending.push_back(call);
  struct Pop {
    ~Pop() { pending.pop_back(); }
  } pop;
  python.callBoxed(op, keys, stack);
}

c10::OperatorHandle operator_of(const char* name, const char* overload) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
}

// Whether a tensor can be viewed as a matrix with the last dimension as columns. `aten.matmul` checks the same.
bool folds(c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  for (size_t i = 0; i + 2 < sizes.size(); ++i) {
    if (strides[i] != strides[i + 1] * sizes[i + 1]) {
      return false;
    }
  }
  return true;
}

bool folds(const at::Tensor& t) { return folds(t.sizes(), t.strides()); }

// Whether the library's choice of a product depends on whether a weight requires gradients (`wooly.kernels.folding`).
bool depends_on_gradients(Facts::Product product, const Stack& stack) {
  if (product == Facts::kLinear) {
    const at::Tensor& weight = torch::jit::peek(stack, 1, 3).toTensor();
    return weight.defined() && weight.requires_grad() && !folds(torch::jit::peek(stack, 0, 3).toTensor());
  }
  constexpr size_t n = 9;
  const auto params = torch::jit::peek(stack, 2, n).toTensorVector();
  if (std::none_of(params.begin(), params.end(), [](const at::Tensor& p) { return p.defined() && p.requires_grad(); })) {
    return false;
  }
  const at::Tensor& x = torch::jit::peek(stack, 0, n).toTensor();
  if (x.dim() != 3) {
    return false;
  }
  return torch::jit::peek(stack, 8, n).toBool() ? x.stride(1) != x.stride(0) * x.size(0) : !folds(x);
}

class Kernel final : public c10::OperatorKernel {
 public:
  Kernel(Facts facts, c10::SafeKernelFunction python) : facts_(std::move(facts)), python_(std::move(python)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    // Some kernels in Python make of a traced call what a tracer can record.
    if (!enabled.load(std::memory_order_relaxed) || torch::jit::tracer::isTracing() ||
        (facts_.product != Facts::kNone && depends_on_gradients(facts_.product, *stack))) {
      python_.callBoxed(op, keys, stack);
      return;
    }
    Signature s;
    bool teach = false;
    if (sign(facts_, op.schema(), *stack, s) && try_record(op, s, stack, teach)) {
      return;
    }
    call_python(python_, op, keys, stack, {&facts_, &s, &known_, teach});
  }

 private:
  // Returns false if the kernel in Python must handle the call; `teach`: and may teach it.
  bool try_record(const c10::OperatorHandle& op, const Signature& s, Stack* stack, bool& teach) {
    Gil gil;
    const Learned* learned = known_.find(s);
    if (learned == nullptr) {
      teach = true;
      return false;
    }
    if (learned->plan == nullptr) {
      return false;
    }
    const Plan& plan = *learned->plan;
    auto* heap = reinterpret_cast<HeapFields*>(plan.program->heap);
    if (!is_usual(plan, heap, s)) {
      return false;
    }
    std::vector<at::Tensor> results;
    try {
      PyObject* origin = find_origin();
      if (origin == nullptr) {
        return false;
      }
      Lock lock(plan.program->lock);
      if (!lock.held) {
        PyErr_Clear();
        return false;
      }
      try {
        record(plan, heap, s, origin, results);
      } catch (const PythonFailure&) {
        PyObject *type, *value, *trace;
        PyErr_Fetch(&type, &value, &trace);
        Ref(PyObject_CallMethodNoArgs(reinterpret_cast<PyObject*>(plan.program), str_drop_incomplete));
        PyErr_Restore(type, value, trace);
        throw;
      }
    } catch (const PythonFailure&) {
      raise_python_error();
    }
    ++n_native;
    finish(op, results, stack);
    return true;
  }

  void finish(const c10::OperatorHandle& op, std::vector<at::Tensor>& results, Stack* stack) const {
    const size_t n = op.schema().arguments().size();
    if (!facts_.writes) {
      torch::jit::drop(*stack, n);
      if (facts_.list_return) {
        stack->emplace_back(std::move(results));
      } else {
        for (at::Tensor& t : results) {
          stack->emplace_back(std::move(t));
        }
      }
      return;
    }
    if (facts_.counts_changes) {
      count_changes(op, *stack);
    }
    c10::SmallVector<c10::IValue, 4> returned;
    auto fresh = results.begin();
    for (int64_t at : facts_.returned) {
      returned.push_back(at < 0 ? c10::IValue(std::move(*fresh++)) : torch::jit::peek(*stack, at, n));
    }
    torch::jit::drop(*stack, n);
    for (c10::IValue& value : returned) {
      stack->push_back(std::move(value));
    }
  }

  // Count a change of each tensor of the lists that the operator writes, as CUDA's kernels do: autograd compares the count with
  // that of the tensors that it has saved. PyTorch does it for tensors only.
  static void count_changes(const c10::OperatorHandle& op, const Stack& stack) {
    const auto& declared = op.schema().arguments();
    for (size_t i = 0; i < declared.size(); ++i) {
      const c10::IValue& a = torch::jit::peek(stack, i, declared.size());
      if (declared[i].alias_info() != nullptr && declared[i].alias_info()->isWrite() && a.isTensorList()) {
        for (const at::Tensor& t : a.toTensorVector()) {
          if (!t.is_inference()) {
            t.unsafeGetTensorImpl()->bump_version();
          }
        }
      }
    }
  }

  Facts facts_;
  c10::SafeKernelFunction python_;
  Known& known_ = *new Known(); // never freed: PyTorch ends its kernels after Python has ended
};

// The kernel of an operator that changes only metadata: the CPU's kernel, which does not access memory.
class ViewKernel final : public c10::OperatorKernel {
 public:
  explicit ViewKernel(c10::SafeKernelFunction python) : python_(std::move(python)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    if (!enabled.load(std::memory_order_relaxed)) {
      python_.callBoxed(op, keys, stack);
      return;
    }
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }

 private:
  c10::SafeKernelFunction python_;
};

// Whether a tensor has a tangent (forward-mode AD outside of `torch.func`).
bool has_tangent(const at::Tensor& t) { return t._fw_grad(/*level=*/0).defined(); }

// `aten.linear` under autograd, for plain tensors (`wooly.kernels.layers.linear`): one instruction without gradients and
// tangents, else PyTorch's decomposition.
class LinearKernel final : public c10::OperatorKernel {
 public:
  explicit LinearKernel(c10::SafeKernelFunction python) : python_(std::move(python)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    bool plain = enabled.load(std::memory_order_relaxed) && !c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::Python);
    bool gradients = false, tangents = false;
    for (size_t i = 0; plain && i < 3; ++i) {
      const c10::IValue& a = torch::jit::peek(*stack, i, 3);
      if (a.isNone() && i == 2) {
        continue;
      }
      const at::Tensor& t = a.toTensor();
      if (i == 2 && !t.defined()) {
        continue;
      }
      plain = t.defined() && is_plain(t.unsafeGetTensorImpl()) && !t.is_complex();
      gradients = gradients || (plain && t.requires_grad());
      tangents = tangents || (plain && has_tangent(t));
    }
    if (plain && gradients && !c10::GradMode::is_enabled()) {
      // ATen's choice of the product depends on whether the weight requires gradients also without gradients.
      gradients = depends_on_gradients(Facts::kLinear, *stack);
    }
    if (!plain) {
      python_.callBoxed(op, keys, stack);
    } else if (gradients || tangents) {
      op.callBoxedForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd, *stack);
    } else {
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), stack);
    }
  }

 private:
  c10::SafeKernelFunction python_;
};

// An operator under autograd that is recorded as one instruction although PyTorch would decompose it (`wooly.kernels.whole`):
// calls with plain tensors, without gradients and tangents. Python handles the others.
class WholeKernel final : public c10::OperatorKernel {
 public:
  explicit WholeKernel(c10::SafeKernelFunction python) : python_(std::move(python)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    bool native = enabled.load(std::memory_order_relaxed) && !is_observed();
    const size_t n = op.schema().arguments().size();
    for (size_t i = 0; native && i < n; ++i) {
      const c10::IValue& a = torch::jit::peek(*stack, i, n);
      if (a.isTensor()) {
        native = suits(a.toTensor());
      } else if (a.isTensorList()) {
        for (const at::Tensor& t : a.toTensorVector()) {
          native = native && suits(t);
        }
      }
    }
    if (native) {
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), stack);
    } else {
      python_.callBoxed(op, keys, stack);
    }
  }

 private:
  // Whether a mode of PyTorch (`torch_dispatch`), a function transform (`torch.func`) or a trace (`torch.jit.trace`) looks at the
  // call.
  static bool is_observed() {
    using c10::DispatchKey;
    using c10::impl::tls_is_dispatch_key_included;
    return tls_is_dispatch_key_included(DispatchKey::Python) ||
           tls_is_dispatch_key_included(DispatchKey::FuncTorchDynamicLayerFrontMode) ||
           tls_is_dispatch_key_included(DispatchKey::FuncTorchDynamicLayerBackMode) || torch::jit::tracer::isTracing();
  }

  static bool suits(const at::Tensor& t) {
    return t.defined() && is_plain(t.unsafeGetTensorImpl()) && !(t.requires_grad() && c10::GradMode::is_enabled()) &&
           !has_tangent(t);
  }

  c10::SafeKernelFunction python_;
};

// `aten.scaled_dot_product_attention` (`wooly.kernels.attention`): calls for which Python has chosen the fused kernel of the
// executor's library.
class AttentionKernel final : public c10::OperatorKernel {
 public:
  AttentionKernel(Facts facts, c10::SafeKernelFunction python) : facts_(std::move(facts)), python_(std::move(python)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    if (!enabled.load(std::memory_order_relaxed)) {
      python_.callBoxed(op, keys, stack);
      return;
    }
    Signature s;
    bool known = false, teach = false;
    if (!c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::Python) && sign(facts_, op.schema(), *stack, s)) {
      add_circumstances(*stack, s);
      Gil gil;
      known = known_.find(s) != nullptr;
      teach = !known;
    }
    if (!known) {
      call_python(python_, op, keys, stack, {&facts_, &s, &known_, teach});
      return;
    }
    at::Tensor numbers; // freed after the second result, as in Python
    c10::IValue& mask = torch::jit::peek(*stack, 3, kArguments);
    if (mask.isTensor() && mask.toTensor().scalar_type() == at::kBool) {
      const auto dtype = torch::jit::peek(*stack, 0, kArguments).toTensor().scalar_type();
      numbers = at::where(mask.toTensor(), at::zeros({}, dtype), -std::numeric_limits<double>::infinity());
      mask = numbers;
    }
    static const auto fused = operator_of("aten::_scaled_dot_product_flash_attention_for_cpu", "");
    Stack call;
    for (size_t at : {0, 1, 2, 4, 5, 3, 6}) { // query, key, value, dropout, causal; mask, scale
      call.push_back(std::move(torch::jit::peek(*stack, at, kArguments)));
    }
    torch::jit::drop(*stack, kArguments);
    fused.callBoxed(call);
    stack->push_back(std::move(call.front()));
  }

 private:
  static constexpr size_t kArguments = 8;

  // What the choice depends on beside the arguments: gradients, and the switches of `torch.nn.attention.sdpa_kernel`.
  static void add_circumstances(const Stack& stack, Signature& s) {
    const auto& context = at::globalContext();
    int64_t found = context.userEnabledFlashSDP() | context.userEnabledMathSDP() << 1 |
                    context.userEnabledMemEfficientSDP() << 2 | context.userEnabledCuDNNSDP() << 3;
    for (size_t i = 0; i < 4 && c10::GradMode::is_enabled(); ++i) {
      const c10::IValue& a = torch::jit::peek(stack, i, kArguments);
      found |= static_cast<int64_t>(a.isTensor() && a.toTensor().requires_grad()) << (4 + i);
    }
    s.key.push_back(found);
  }

  Facts facts_;
  c10::SafeKernelFunction python_;
  Known& known_ = *new Known();
};

// `aten.arange` of integers (`wooly.kernels.transfer.Transfer.arange`): a new tensor, and the operator that fills it.
class ArangeKernel final : public c10::OperatorKernel {
 public:
  explicit ArangeKernel(c10::SafeKernelFunction python) : python_(std::move(python)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    constexpr size_t kOptions = 4; // dtype, layout, device, pinned: the last arguments
    const size_t n = op.schema().arguments().size();
    const c10::IValue* args = stack->data() + (stack->size() - n);
    const c10::IValue* options = args + (n - kOptions);
    int64_t start = 0, end = 0, step = 1; // the arguments before: end; start, end; start, end, step
    if (!enabled.load(std::memory_order_relaxed) || !integers(args, n - kOptions, start, end, step) ||
        !(options[0].isNone() || options[0].toInt() == static_cast<int64_t>(at::kLong))) {
      python_.callBoxed(op, keys, stack);
      return;
    }
    static const auto empty = operator_of("aten::empty", "memory_format");
    static const auto fill = operator_of("aten::arange", "start_out");
    const auto here = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
    Stack made{c10::IValue(std::vector<int64_t>{(end - start + step - 1) / step}),
               static_cast<int64_t>(at::kLong), options[1], options[2], options[3], c10::IValue()};
    empty.redispatchBoxed(here, &made);
    Stack filled{start, end, step, std::move(made.front())};
    fill.redispatchBoxed(here, &filled);
    torch::jit::drop(*stack, n);
    stack->push_back(std::move(filled.front()));
  }

 private:
  // Above this number, the size would not be exact in PyTorch's arithmetic.
  static constexpr int64_t kMost = 1LL << 52;

  static bool integers(const c10::IValue* args, size_t n, int64_t& start, int64_t& end, int64_t& step) {
    for (size_t i = 0; i < n; ++i) {
      if (!args[i].isInt() || args[i].toInt() > kMost || args[i].toInt() < -kMost) {
        return false;
      }
    }
    start = n > 1 ? args[0].toInt() : 0;
    end = args[n > 1].toInt();
    step = n > 2 ? args[2].toInt() : 1;
    return step > 0 && end >= start;
  }

  c10::SafeKernelFunction python_;
};

// PyTorch's guard for backends in Python asks Python for its type, several times per operation of a backward, and the type is in
// each of its answers. It has no state, so its answers are asked for once.
class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  explicit Guard(const c10::impl::DeviceGuardImplInterface* python)
      : python_(python),
        type_(python->type()),
        device_(python->getDevice()),
        exchanged_(python->exchangeDevice(device_)),
        stream_(python->getStream(device_)),
        exchanged_stream_(python->exchangeStream(stream_)) {}

  c10::DeviceType type() const override { return on() ? type_ : python_->type(); }
  c10::Device exchangeDevice(c10::Device d) const override { return on() ? exchanged_ : python_->exchangeDevice(d); }
  c10::Device getDevice() const override { return on() ? device_ : python_->getDevice(); }
  c10::Stream getStream(c10::Device d) const override { return on() ? stream_ : python_->getStream(d); }
  c10::Stream exchangeStream(c10::Stream s) const override { return on() ? exchanged_stream_ : python_->exchangeStream(s); }
  void setDevice(c10::Device d) const override { python_->setDevice(d); }
  void uncheckedSetDevice(c10::Device d) const noexcept override { python_->uncheckedSetDevice(d); }
  c10::Stream getNewStream(c10::Device d, int priority) const override { return python_->getNewStream(d, priority); }
  c10::DeviceIndex deviceCount() const noexcept override { return python_->deviceCount(); }
  void record(void** event, const c10::Stream& s, const c10::DeviceIndex d, const c10::EventFlag flag) const override {
    python_->record(event, s, d, flag);
  }
  void block(void* event, const c10::Stream& s) const override { python_->block(event, s); }
  bool queryEvent(void* event) const override { return python_->queryEvent(event); }
  void destroyEvent(void* event, const c10::DeviceIndex d) const noexcept override { python_->destroyEvent(event, d); }
  bool queryStream(const c10::Stream& s) const override { return python_->queryStream(s); }
  void synchronizeStream(const c10::Stream& s) const override { python_->synchronizeStream(s); }

 private:
  static bool on() { return enabled.load(std::memory_order_relaxed); }

  const c10::impl::DeviceGuardImplInterface* python_;
  c10::DeviceType type_;
  c10::Device device_, exchanged_;
  c10::Stream stream_, exchanged_stream_;
};

// -- the module -----------------------------------------------------------------------------------------------------------

std::vector<std::unique_ptr<c10::RegistrationHandleRAII>>& registrations() {
  static auto* kept = new std::vector<std::unique_ptr<c10::RegistrationHandleRAII>>();
  return *kept;
}

template <typename Functor>
void put(const c10::OperatorHandle& op, c10::DispatchKey key, std::unique_ptr<Functor> functor) {
  registrations().push_back(std::make_unique<c10::RegistrationHandleRAII>(c10::Dispatcher::singleton().registerImpl(
      op.operator_name(), key,
      c10::KernelFunction::makeFromBoxedFunctor(std::move(functor)), std::nullopt, nullptr, "wooly_native")));
}

PyObject* register_kernel(PyObject*, PyObject* args) {
  const char *name, *overload, *shown, *place;
  PyObject *scalar, *keywords, *returned;
  int writes, list_return;
  if (!PyArg_ParseTuple(args, "ssssO!O!O!pp", &name, &overload, &place, &shown, &PyTuple_Type, &scalar, &PyFrozenSet_Type,
                        &keywords, &PyTuple_Type, &returned, &writes, &list_return)) {
    return nullptr;
  }
  HANDLE_TH_ERRORS
  auto op = operator_of(name, overload);
  const auto& schema = op.schema();
  const auto& declared = schema.arguments();
  Facts facts;
  facts.name = shown;
  facts.writes = writes;
  facts.list_return = list_return;
  facts.keyword_from = static_cast<size_t>(PyTuple_GET_SIZE(scalar));
  for (size_t i = 0; i < declared.size(); ++i) {
    if (i < facts.keyword_from) {
      facts.scalar.push_back(PyObject_IsTrue(PyTuple_GET_ITEM(scalar, i)) == 1);
    } else {
      Ref keyword(PyUnicode_FromString(declared[i].name().c_str()));
      facts.scalar.push_back(PySet_Contains(keywords, keyword) == 1);
    }
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(returned); ++i) {
    PyObject* argument = PyTuple_GET_ITEM(returned, i);
    auto at = argument == Py_None ? std::nullopt : schema.argumentIndexWithName(PyUnicode_AsUTF8(argument));
    facts.returned.push_back(at.has_value() ? *at : -1);
  }
  facts.factory = std::none_of(declared.begin(), declared.end(), [](const c10::Argument& a) {
    return a.type()->isSubtypeOf(*c10::TensorType::get());
  });
  if (schema.name() == "aten::linear") {
    facts.product = Facts::kLinear;
  } else if (schema.overload_name() == "input" &&
             (schema.name() == "aten::gru" || schema.name() == "aten::rnn_tanh" || schema.name() == "aten::rnn_relu")) {
    facts.product = Facts::kRecurrent;
  }
  facts.counts_changes = writes && schema.name().rfind("aten::_foreach_", 0) == 0;
  const auto key = c10::parseDispatchKey(place);
  put(op, key, std::make_unique<Kernel>(std::move(facts), op.getComputedKernelForDispatchKey(key)));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// Put a kernel before that in Python of the operator that `args` names.
template <typename Functor>
PyObject* put_before(PyObject* args, c10::DispatchKey key) {
  const char *name, *overload;
  if (!PyArg_ParseTuple(args, "ss", &name, &overload)) {
    return nullptr;
  }
  HANDLE_TH_ERRORS
  auto op = operator_of(name, overload);
  put(op, key, std::make_unique<Functor>(op.getComputedKernelForDispatchKey(key)));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* register_view(PyObject*, PyObject* args) { return put_before<ViewKernel>(args, c10::DispatchKey::PrivateUse1); }

PyObject* register_whole(PyObject*, PyObject* args) {
  return put_before<WholeKernel>(args, c10::DispatchKey::AutogradPrivateUse1);
}

PyObject* register_linear(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  auto op = operator_of("aten::linear", "");
  const auto key = c10::DispatchKey::AutogradPrivateUse1;
  put(op, key, std::make_unique<LinearKernel>(op.getComputedKernelForDispatchKey(key)));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* register_attention(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  auto op = operator_of("aten::scaled_dot_product_attention", "");
  for (auto key : {c10::DispatchKey::AutogradPrivateUse1, c10::DispatchKey::PrivateUse1}) {
    Facts facts;
    facts.name = "aten.scaled_dot_product_attention.default";
    facts.scalar.assign(op.schema().arguments().size(), 0);
    facts.keyword_from = facts.scalar.size();
    put(op, key, std::make_unique<AttentionKernel>(std::move(facts), op.getComputedKernelForDispatchKey(key)));
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* register_arange(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  for (const char* overload : {"", "start", "start_step"}) {
    auto op = operator_of("aten::arange", overload);
    for (auto key : {c10::DispatchKey::PrivateUse1, c10::DispatchKey::CUDA}) {
      put(op, key, std::make_unique<ArangeKernel>(op.getComputedKernelForDispatchKey(key)));
    }
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// Also puts the guard in place.
PyObject* set_up(PyObject*, PyObject* args) {
  PyObject* known_heaps;
  if (!PyArg_ParseTuple(args, "O!", &PyTuple_Type, &known_heaps)) {
    return nullptr;
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(known_heaps) && i < kMaxDevices; ++i) {
    heaps[i] = reinterpret_cast<HeapFields*>(Py_NewRef(PyTuple_GET_ITEM(known_heaps, i)));
  }
  auto& registered = c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::kPrivateUse1)];
  registered.store(new Guard(registered.load())); // as long as the process
  Py_RETURN_NONE;
}

// Make a zero tensor without memory, as `aten._efficientzerotensor` does for CUDA: its dispatch keys say that all elements are 0.
PyObject* zero_tensor(PyObject*, PyObject* args) {
  PyObject *given, *dtype;
  int device;
  if (!PyArg_ParseTuple(args, "O!O!i", &PyTuple_Type, &given, &THPDtypeType, &dtype, &device)) {
    return nullptr;
  }
  HANDLE_TH_ERRORS
  std::vector<int64_t> sizes;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(given); ++i) {
    const auto size = PyLong_AsLongLong(PyTuple_GET_ITEM(given, i));
    if (size == -1 && PyErr_Occurred()) {
      return nullptr;
    }
    sizes.push_back(size);
  }
  const auto meta = c10::scalarTypeToTypeMeta(reinterpret_cast<THPDtype*>(dtype)->scalar_type);
  const c10::Device place(c10::kPrivateUse1, static_cast<c10::DeviceIndex>(device));
  const auto nbytes = at::detail::computeStorageNbytesContiguous(sizes, meta.itemsize());
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), nbytes, c10::DataPtr(nullptr, place),
                                                       /*allocator=*/nullptr, /*resizable=*/false);
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(std::move(storage)), c10::DispatchKeySet({c10::DispatchKey::PrivateUse1, c10::DispatchKey::ZeroTensor}), meta);
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return THPVariable_Wrap(std::move(tensor));
  END_HANDLE_TH_ERRORS
}

PyObject* forget(PyObject*, PyObject*) {
  ++epoch;
  n_plans = 0;
  Py_RETURN_NONE;
}

PyObject* ask_for_libraries(PyObject*, PyObject* asks) {
  Py_XSETREF(is_library, Py_NewRef(asks));
  Py_RETURN_NONE;
}

PyObject* origin(PyObject*, PyObject* const* args, Py_ssize_t n) {
  const long depth = n > 0 ? PyLong_AsLong(args[0]) : 2;
  if (depth == -1 && PyErr_Occurred()) {
    return nullptr;
  }
  try {
    return Py_XNewRef(find_origin(static_cast<int>(depth) - 1));
  } catch (const PythonFailure&) {
    return nullptr;
  }
}

// Kinds of the parameters of a foreign kernel (`wooly.kernels.launch.ForeignKernel.kinds`).
enum Parameter : char { kPointer, kUnsigned64, kOther };

// Add the arguments of a launch to its key, its buffers and its params, as `Launches.launch` does. Returns False, and adds
// nothing, if only Python may handle the launch.
PyObject* collect_launch(PyObject*, PyObject* args) {
  PyObject *kinds, *given, *key, *buffers, *params;
  if (!PyArg_ParseTuple(args, "O!O!O!O!O!", &PyBytes_Type, &kinds, &PyTuple_Type, &given, &PyList_Type, &key, &PyList_Type,
                        &buffers, &PyList_Type, &params)) {
    return nullptr;
  }
  const Py_ssize_t n = PyTuple_GET_SIZE(given);
  const char* kind = PyBytes_AS_STRING(kinds);
  if (PyBytes_GET_SIZE(kinds) != n) {
    Py_RETURN_FALSE;
  }
  c10::SmallVector<std::pair<uint64_t, size_t>, 16> places; // address, bytes of the storage
  for (Py_ssize_t i = 0; i < n; ++i) {
    PyObject* a = PyTuple_GET_ITEM(given, i);
    if (kind[i] == kUnsigned64 && !PyLong_CheckExact(a)) {
      Py_RETURN_FALSE;
    }
    if (kind[i] != kPointer || a == Py_None) {
      continue;
    }
    if (!THPVariable_Check(a)) {
      Py_RETURN_FALSE;
    }
    const at::TensorImpl* t = THPVariable_Unpack(a).unsafeGetTensorImpl();
    if (!is_plain(t)) {
      Py_RETURN_FALSE;
    }
    const auto address = address_of(t);
    const uint64_t device = (1ULL << kDeviceBits) - 1;
    if (!(address >> kIdShift) || (!places.empty() && ((address ^ places[0].first) >> kIdShift & device) != 0)) {
      Py_RETURN_FALSE;
    }
    places.emplace_back(address, t->unsafe_storage().nbytes());
  }
  try {
    size_t at = 0;
    for (Py_ssize_t i = 0; i < n; ++i) {
      PyObject* a = PyTuple_GET_ITEM(given, i);
      if (kind[i] == kOther) {
        append(params, a);
      } else if (kind[i] == kUnsigned64) {
        const auto value = PyLong_AsUnsignedLongLong(a);
        must(!PyErr_Occurred());
        append(params, Ref(made(PyLong_FromLongLong(static_cast<long long>(value)))));
      } else if (a == Py_None) {
        append(key, a);
      } else {
        const auto [address, nbytes] = places[at++];
        append(buffers, Ref(made(PyLong_FromUnsignedLongLong(address >> kIdShift))));
        append(key, Ref(made(PyLong_FromUnsignedLongLong(address & kPlaceMask))));
        append(key, Ref(made(PyLong_FromSize_t(nbytes))));
      }
    }
  } catch (const PythonFailure&) {
    return nullptr;
  }
  Py_RETURN_TRUE;
}

PyObject* forget_origins(PyObject*, PyObject*) {
  for (auto& [code, library] : library_code) {
    Py_DECREF(code);
  }
  library_code.clear();
  Py_RETURN_NONE;
}

PyObject* switch_to(PyObject*, PyObject* on) {
  enabled = PyObject_IsTrue(on) == 1;
  Py_RETURN_NONE;
}

PyObject* counts(PyObject*, PyObject*) { return Py_BuildValue("KK", n_native, n_python); }

PyObject* disarm(PyObject*, PyObject*) {
  if (!pending.empty()) {
    pending.back().armed = false;
  }
  Py_RETURN_NONE;
}

bool same_params(const Signature& s, PyObject* params) {
  if (PyList_GET_SIZE(params) != static_cast<Py_ssize_t>(s.params.size())) {
    return false;
  }
  for (size_t i = 0; i < s.params.size(); ++i) {
    PyObject* given = PyList_GET_ITEM(params, i);
    Ref own(made(param_object(s.params[i])));
    if (Py_TYPE(given) != Py_TYPE(own.object)) {
      return false;
    }
    const bool is_float = PyFloat_CheckExact(given);
    if (is_float ? bits_of(PyFloat_AS_DOUBLE(given)) != bits_of(PyFloat_AS_DOUBLE(own.object))
                 : PyObject_RichCompareBool(given, own, Py_EQ) != 1) {
      return false;
    }
  }
  return true;
}

bool same_buffers(const Signature& s, PyObject* buffers) {
  if (PyList_GET_SIZE(buffers) != static_cast<Py_ssize_t>(s.buffers.size())) {
    return false;
  }
  for (size_t i = 0; i < s.buffers.size(); ++i) {
    if (PyLong_AsLongLong(PyList_GET_ITEM(buffers, i)) != s.buffers[i]) {
      return false;
    }
  }
  return true;
}

std::vector<int64_t> numbers_of(PyObject* tuple) {
  std::vector<int64_t> found;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i) {
    found.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, i)));
  }
  return found;
}

// Returns null if a storage is too large for this module.
std::unique_ptr<Plan> plan_of(PyObject* program, PyObject* form, PyObject* outs, PyObject* written) {
  auto plan = std::make_unique<Plan>();
  plan->program = reinterpret_cast<ProgramFields*>(Py_NewRef(program)); // recorders live as long as the process
  plan->form = Ref(form == Py_None ? nullptr : Py_NewRef(form));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(outs); ++i) {
    PyObject* out = PyTuple_GET_ITEM(outs, i);
    if (out == Py_None) {
      plan->outs.push_back(nullptr);
      continue;
    }
    auto layout = std::make_unique<Layout>();
    PyObject* shape = PyTuple_GET_ITEM(out, 0);
    layout->alloc_form = Ref(Py_NewRef(PyTuple_GET_ITEM(out, 1)));
    Ref nbytes(made(PyObject_GetAttrString(shape, "nbytes"))), dtype(made(PyObject_GetAttrString(shape, "dtype")));
    Ref sizes(made(PyObject_GetAttrString(shape, "sizes"))), strides(made(PyObject_GetAttrString(shape, "strides")));
    layout->nbytes = PyLong_AsLongLong(nbytes);
    layout->dtype = reinterpret_cast<THPDtype*>(dtype.object)->scalar_type;
    layout->sizes = numbers_of(sizes);
    layout->strides = numbers_of(strides);
    must(!PyErr_Occurred());
    if (layout->nbytes >= kMaxBytes) {
      return nullptr;
    }
    plan->outs.push_back(std::move(layout));
  }
  for (int64_t at : numbers_of(written)) {
    plan->written.push_back(static_cast<size_t>(at));
  }
  must(!PyErr_Occurred());
  return plan;
}

// Whether Python may teach the call that it handles now, and this is a call of the operator `name`. It may teach it once.
bool is_taught(const char* name) {
  if (pending.empty() || !pending.back().armed || pending.back().facts->name != name) {
    return false;
  }
  pending.back().armed = false;
  if (n_plans >= kMaxPlans) {
    ++epoch;
    n_plans = 0;
    return false;
  }
  return true;
}

PyObject* learn_fused(PyObject*, PyObject* name) {
  const char* shown = PyUnicode_AsUTF8(name);
  if (shown == nullptr) {
    return nullptr;
  }
  if (is_taught(shown)) {
    pending.back().known->add(*pending.back().signature);
  }
  Py_RETURN_NONE;
}

PyObject* learn(PyObject*, PyObject* args) {
  const char* name;
  PyObject *program, *form, *outs, *written, *buffers, *params, *apart = nullptr;
  int copies = 0;
  if (!PyArg_ParseTuple(args, "sO!OO!O!O!O!|pO!", &name, &ProgramType, &program, &form, &PyTuple_Type, &outs, &PyTuple_Type,
                        &written, &PyList_Type, &buffers, &PyList_Type, &params, &copies, &PyTuple_Type, &apart)) {
    return nullptr;
  }
  if (!is_taught(name)) {
    Py_RETURN_NONE;
  }
  const Pending& call = pending.back();
  try {
    const Signature& s = *call.signature;
    Learned& learned = call.known->add(s);
    if (same_buffers(s, buffers) && same_params(s, params)) {
      learned.plan = plan_of(program, form, outs, written);
    }
    if (learned.plan != nullptr) {
      learned.plan->copies = copies;
      for (Py_ssize_t i = 0; apart != nullptr && i < PyTuple_GET_SIZE(apart); ++i) {
        const auto pair = numbers_of(PyTuple_GET_ITEM(apart, i));
        learned.plan->apart.emplace_back(pair[0], pair[1]);
      }
    }
  } catch (const PythonFailure&) {
    return nullptr;
  }
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"register_kernel", register_kernel, METH_VARARGS, "Put a native kernel before the kernel in Python of an operator."},
    {"register_view", register_view, METH_VARARGS, "Let an operator on metadata run its CPU kernel."},
    {"register_linear", register_linear, METH_NOARGS, "Put a native kernel before the kernel in Python of aten.linear."},
    {"register_arange", register_arange, METH_NOARGS, "Put native kernels before those in Python of aten.arange."},
    {"register_attention", register_attention, METH_NOARGS, "Put native kernels before those in Python of attention."},
    {"register_whole", register_whole, METH_VARARGS,
     "Put a native kernel before that in Python of an operator that is recorded as one instruction."},
    {"set_up", set_up, METH_VARARGS, "Set the heaps."},
    {"ask_for_libraries", ask_for_libraries, METH_O, "Set the function that says whether code belongs to a library."},
    {"origin", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(origin)), METH_FASTCALL,
     "The innermost Python line on the stack that is not in a library."},
    {"collect_launch", collect_launch, METH_VARARGS, "Add the arguments of a launch to its key, buffers and params."},
    {"zero_tensor", zero_tensor, METH_VARARGS, "Make a zero tensor without memory of these sizes, on a device of this index."},
    {"learn", learn, METH_VARARGS, "Teach the kernel that called Python the plan of its call."},
    {"learn_fused", learn_fused, METH_O, "Teach the kernel of attention that its call has the library's fused kernel."},
    {"disarm", disarm, METH_NOARGS, "The call of the kernel that called Python must not be taught."},
    {"forget", forget, METH_NOARGS, "Forget all plans."},
    {"forget_origins", forget_origins, METH_NOARGS, "Forget which code belongs to a library."},
    {"switch", switch_to, METH_O, "Whether native kernels record calls. Else all calls go to Python."},
    {"counts", counts, METH_NOARGS, "Number of calls that were recorded natively, and that Python handled."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "wooly_native._native", "Native kernels of the Wooly device.", -1, methods,
                          nullptr, nullptr, nullptr, nullptr};

} // namespace
} // namespace wooly

PyMODINIT_FUNC PyInit__native() {
  using namespace wooly;
  PyObject* module = PyModule_Create(&definition);
  if (module == nullptr || !add_fields(module)) {
    return nullptr;
  }
  str_mirrors = PyUnicode_InternFromString("_mirrors");
  str_forget = PyUnicode_InternFromString("forget");
  str_overwrite = PyUnicode_InternFromString("overwrite");
  str_close_if_due = PyUnicode_InternFromString("close_if_due");
  str_drop_incomplete = PyUnicode_InternFromString("drop_incomplete");
  str_acquire = PyUnicode_InternFromString("acquire");
  str_release = PyUnicode_InternFromString("release");
  return module;
}

// The kernels of operators that Python has taught: they record a call as Python would (`wooly.kernels.generic`), with the same
// program as the result. A kernel starts without knowledge. It gives each call that it does not know to the kernel in Python, and
// Python then teaches it the plan of the call's signature (`learn`). Whatever is unusual also goes to the kernel in Python: a
// captured graph, an observer of memory, another thread that holds the recorder's lock, no room for the result.
#define PY_SSIZE_T_CLEAN
#include <atomic>
#include <memory>
#include <unordered_map>

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>

#include "fields.h"
#include "signature.h"

namespace wooly {
namespace {

using torch::jit::Stack;

// Maximum number of plans of all kernels; at this number all are forgotten (`wooly.kernels.generic._MAX_PLANS`).
constexpr size_t kMaxPlans = 65536;
// Largest storage whose size fits into an entry of `dead` that a pointer can hold.
constexpr long long kMaxBytes = 1LL << (64 - kIdBits);

struct Gil {
  PyGILState_STATE state = PyGILState_Ensure();
  ~Gil() { PyGILState_Release(state); }
};

// A reference to a Python object. Copies and ends only with the interpreter lock.
struct Ref {
  PyObject* object = nullptr;
  Ref() = default;
  explicit Ref(PyObject* owned) : object(owned) {}
  Ref(Ref&& other) noexcept : object(other.object) { other.object = nullptr; }
  Ref& operator=(Ref&& other) noexcept {
    std::swap(object, other.object);
    return *this;
  }
  ~Ref() { Py_XDECREF(object); }
  operator PyObject*() const { return object; }
};

// Thrown with Python's error set.
struct PythonFailure {};

void must(bool fine) {
  if (!fine) {
    throw PythonFailure();
  }
}

PyObject* made(PyObject* object) {
  must(object != nullptr);
  return object;
}

[[noreturn]] void raise_python_error() {
  python_error error;
  error.persist();
  throw std::move(error);
}

// -- storages -------------------------------------------------------------------------------------------------------------

HeapFields* heaps[kMaxDevices] = {};

// The deleter of a storage. Its context is the storage's entry of `dead`. It may run in any thread, and while an error is set.
void free_storage(void* context) {
  if (!Py_IsInitialized()) {
    return;
  }
  Gil gil;
  auto entry = reinterpret_cast<unsigned long long>(context);
  HeapFields* heap = heaps[entry & (kMaxDevices - 1)];
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  Ref freed(PyLong_FromUnsignedLongLong(entry));
  if (heap->observed) {
    Ref(PyObject_CallOneArg(heap->tell_free, freed));
  } else {
    heap->live -= 1;
    heap->live_bytes -= static_cast<long long>(entry >> kIdBits);
    PyList_Append(heap->dead, freed);
  }
  if (PyErr_Occurred()) {
    PyErr_WriteUnraisable(nullptr);
  }
  PyErr_Restore(type, value, trace);
}

struct Layout {
  Ref alloc_form;
  long long nbytes = 0;
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> sizes, strides;
};

// Make a tensor on a new storage, as `wooly.storage.Layout.new` does. `id` is the buffer id.
at::Tensor make_tensor(HeapFields* heap, const Layout& layout, unsigned long long id) {
  heap->held_bytes += layout.nbytes;
  heap->live += 1;
  heap->live_bytes += layout.nbytes;
  if (heap->live_bytes > heap->peak_bytes) {
    heap->peak_bytes = heap->live_bytes;
    heap->peak_live = heap->live;
  }
  auto entry = static_cast<unsigned long long>(layout.nbytes) << kIdBits | id;
  c10::DataPtr data(reinterpret_cast<void*>(id << kIdShift), reinterpret_cast<void*>(entry), &free_storage,
                    c10::Device(c10::kPrivateUse1, static_cast<c10::DeviceIndex>(heap->index)));
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), layout.nbytes, std::move(data),
                                                       /*allocator=*/nullptr, /*resizable=*/false);
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(std::move(storage)), c10::DispatchKey::PrivateUse1,
                                                         c10::scalarTypeToTypeMeta(layout.dtype));
  if (layout.sizes.size() != 1 || layout.sizes[0] != 0) {
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(layout.sizes, layout.strides);
  }
  return tensor;
}

// -- origins --------------------------------------------------------------------------------------------------------------

PyObject* is_library = nullptr; // asks Python whether a code object belongs to a library
std::unordered_map<PyObject*, bool> library_code;
struct {
  PyObject* code = nullptr;
  int at = -1;
  PyObject* origin = nullptr;
} last_origin;

// The innermost Python line that is not in a library (`wooly.origins.origin`). Returns a borrowed reference.
PyObject* find_origin() {
  PyFrameObject* frame = PyEval_GetFrame();
  if (frame == nullptr) {
    return nullptr;
  }
  Ref holder;
  PyFrameObject* first = frame;
  PyFrameObject* found = nullptr;
  while (frame != nullptr) {
    Ref code(reinterpret_cast<PyObject*>(PyFrame_GetCode(frame)));
    auto known = library_code.find(code);
    bool library;
    if (known == library_code.end()) {
      Ref answer(made(PyObject_CallOneArg(is_library, code)));
      library = answer.object == Py_True;
      Py_INCREF(code.object); // stays alive, so that its address is not used again
      library_code.emplace(code.object, library);
    } else {
      library = known->second;
    }
    if (!library) {
      found = frame;
      break;
    }
    holder = Ref(reinterpret_cast<PyObject*>(PyFrame_GetBack(frame)));
    frame = reinterpret_cast<PyFrameObject*>(holder.object);
  }
  if (found == nullptr) {
    found = first;
  }
  Ref code(reinterpret_cast<PyObject*>(PyFrame_GetCode(found)));
  int at = PyFrame_GetLasti(found);
  if (last_origin.code != code.object || last_origin.at != at) {
    Ref number(made(PyLong_FromLong(at)));
    PyObject* origin = made(PyTuple_Pack(2, code.object, number.object));
    Py_XSETREF(last_origin.origin, origin);
    last_origin.code = code.object; // alive as long as the tuple
    last_origin.at = at;
  }
  return last_origin.origin;
}

// -- recording ------------------------------------------------------------------------------------------------------------

struct Plan {
  ProgramFields* program = nullptr;
  Ref form;
  std::vector<std::unique_ptr<Layout>> outs; // null: the operator returns an undefined tensor
  std::vector<size_t> written;               // positions of the buffers that the call writes
};

struct Learned {
  std::vector<int64_t> key;
  std::unique_ptr<Plan> plan; // null: only Python may handle calls with this signature
};

// A call that the kernel in Python handles now, and that Python may teach.
struct Pending {
  const Facts* facts;
  const Signature* signature;
  std::unordered_map<uint64_t, Learned>* plans;
  bool armed;
};

thread_local std::vector<Pending> pending;
std::atomic<bool> enabled{true};
uint64_t epoch = 0; // grows when all plans are forgotten
size_t n_plans = 0;
PyObject *str_mirrors, *str_forget, *str_close_if_due, *str_drop_incomplete, *str_acquire, *str_release;

// Counters for tests and benchmarks: calls that were recorded here, and calls that Python handled.
std::atomic<unsigned long long> n_native{0}, n_python{0};

void append(PyObject* list, PyObject* item) { must(PyList_Append(list, item) == 0); }

PyObject* param_object(const Param& p) {
  switch (p.kind) {
    case Param::kFloat:
      return PyFloat_FromDouble(p.real);
    case Param::kInt:
      return PyLong_FromLongLong(p.integer);
    default:
      return PyBool_FromLong(p.integer != 0);
  }
}

// The host copies of a link (an OrderedDict), or null if there is none.
PyObject* mirrors_of(ProgramFields* program) {
  static PyObject* of = nullptr; // the link that was asked last
  static PyObject* mirrors = nullptr;
  if (of != program->link) {
    PyObject* found = made(PyObject_GetAttr(program->link, str_mirrors));
    Py_XDECREF(mirrors);
    Py_XDECREF(of);
    mirrors = found;
    of = Py_NewRef(program->link);
  }
  return PyDict_GET_SIZE(mirrors) ? mirrors : nullptr;
}

void forget_mirror(ProgramFields* program, PyObject* buffer) {
  if (mirrors_of(program) != nullptr) {
    Ref(made(PyObject_CallMethodOneArg(program->link, str_forget, buffer)));
  }
}

// The slot of a buffer in the open program. Returns a borrowed reference.
PyObject* slot_of(ProgramFields* program, PyObject* buffer) {
  PyObject* slot = PyDict_GetItemWithError(program->slot_of, buffer);
  if (slot != nullptr) {
    return slot;
  }
  must(!PyErr_Occurred());
  Ref added(made(PyLong_FromSsize_t(PyList_GET_SIZE(program->bind))));
  must(PyDict_SetItem(program->slot_of, buffer, added) == 0);
  append(program->bind, buffer);
  return added; // the dict holds it
}

// `Recorder.release_dead`, for a heap without kept buffers and a recorder without a capture.
void release_dead(ProgramFields* program, HeapFields* heap) {
  for (Py_ssize_t n; (n = PyList_GET_SIZE(heap->dead)) > 0;) {
    auto entry = PyLong_AsUnsignedLongLong(PyList_GET_ITEM(heap->dead, n - 1));
    must(!PyErr_Occurred() && PyList_SetSlice(heap->dead, n - 1, n, nullptr) == 0);
    Ref buffer(made(PyLong_FromUnsignedLongLong(entry & kIdMask)));
    Ref slot(Py_XNewRef(PyDict_GetItemWithError(program->slot_of, buffer)));
    if (slot.object == nullptr) {
      must(!PyErr_Occurred());
      append(program->frees, buffer);
    } else {
      must(PyDict_DelItem(program->slot_of, buffer) == 0);
      append(program->words, program->free_form);
      append(program->words, slot);
      append(program->origins, PyList_GET_ITEM(program->origins, PyList_GET_SIZE(program->origins) - 1));
      append(program->freed, buffer);
    }
    forget_mirror(program, buffer);
  }
}

void close_if_due(ProgramFields* program, PyObject* form) {
  long long count = PyList_GET_SIZE(program->origins);
  if (count < program->room) {
    return;
  }
  if (count < program->open_limit) {
    int is_end = PySet_Contains(program->end_forms, form);
    must(is_end >= 0);
    if (!is_end) { // most calls: what Python does with them
      Py_SETREF(program->closed_at_end_form, Py_NewRef(Py_None));
      return;
    }
  }
  Ref(made(PyObject_CallMethodOneArg(reinterpret_cast<PyObject*>(program), str_close_if_due, form)));
}

// Holds a recorder's lock, if no other thread holds it.
struct Lock {
  PyObject* lock;
  bool held;
  explicit Lock(PyObject* lock) : lock(lock) {
    PyObject* args[] = {lock, Py_False};
    Ref got(PyObject_VectorcallMethod(str_acquire, args, 2 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr));
    held = got.object == Py_True;
  }
  ~Lock() {
    if (held) {
      PyObject *type, *value, *trace;
      PyErr_Fetch(&type, &value, &trace);
      Ref(PyObject_CallMethodNoArgs(lock, str_release));
      PyErr_Restore(type, value, trace);
    }
  }
};

// Whether a call with this plan can be recorded here now. Changes nothing.
bool is_usual(const Plan& plan, const HeapFields* heap) {
  const ProgramFields* program = plan.program;
  if (program->replaced || heap->observed || program->link == Py_None) {
    return false;
  }
  if (PyList_GET_SIZE(heap->dead)) {
    // An instruction that an exception left incomplete has a slot, and no origin.
    const bool incomplete = PyDict_GET_SIZE(program->slot_of) && !PyList_GET_SIZE(program->origins);
    if (program->capture != Py_None || PyDict_GET_SIZE(heap->kept) || incomplete) {
      return false;
    }
  }
  long long nbytes = 0;
  Py_ssize_t n = 0;
  for (const auto& out : plan.outs) {
    if (out != nullptr) {
      nbytes += out->nbytes;
      ++n;
    }
  }
  return heap->held_bytes + nbytes <= heap->granted && PyList_GET_SIZE(heap->reusable) >= n;
}

// Record one call. The caller holds the interpreter lock and the recorder's lock.
void record(const Plan& plan, HeapFields* heap, const Signature& s, PyObject* origin, std::vector<at::Tensor>& results) {
  ProgramFields* program = plan.program;
  if (PyList_GET_SIZE(heap->dead)) {
    release_dead(program, heap);
  }
  program->operations += 1;
  for (const Param& p : s.params) {
    Ref value(made(param_object(p)));
    append(program->params, value);
  }
  c10::SmallVector<Ref, 8> buffers;
  for (int64_t id : s.buffers) {
    buffers.emplace_back(made(PyLong_FromLongLong(id)));
  }
  for (size_t at : plan.written) {
    forget_mirror(program, buffers[at]);
  }
  for (const auto& out : plan.outs) {
    if (out == nullptr) {
      results.emplace_back();
      continue;
    }
    Py_ssize_t n = PyList_GET_SIZE(heap->reusable);
    buffers.emplace_back(Py_NewRef(PyList_GET_ITEM(heap->reusable, n - 1)));
    PyObject* buffer = buffers.back();
    must(PyList_SetSlice(heap->reusable, n - 1, n, nullptr) == 0);
    results.push_back(make_tensor(heap, *out, PyLong_AsUnsignedLongLong(buffer)));
    append(program->words, out->alloc_form);
    append(program->words, slot_of(program, buffer));
    append(program->origins, origin);
  }
  append(program->words, plan.form);
  for (const Ref& buffer : buffers) {
    append(program->words, slot_of(program, buffer));
  }
  append(program->origins, origin);
  close_if_due(program, plan.form);
}

class Kernel final : public c10::OperatorKernel {
 public:
  Kernel(Facts facts, c10::SafeKernelFunction python) : facts_(std::move(facts)), python_(std::move(python)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    if (!enabled.load(std::memory_order_relaxed)) {
      python_.callBoxed(op, keys, stack);
      return;
    }
    Signature s;
    bool teach = false;
    if (sign(facts_, op.schema(), *stack, s) && try_record(op, s, stack, teach)) {
      n_native.fetch_add(1, std::memory_order_relaxed);
      return;
    }
    n_python.fetch_add(1, std::memory_order_relaxed);
    // Without `teach` too, so that Python does not teach an outer call of the same operator.
    pending.push_back({&facts_, &s, &plans_, teach});
    struct Pop {
      ~Pop() { pending.pop_back(); }
    } pop;
    python_.callBoxed(op, keys, stack);
  }

 private:
  // Returns false if the kernel in Python must handle the call; `teach`: and may teach it.
  bool try_record(const c10::OperatorHandle& op, const Signature& s, Stack* stack, bool& teach) {
    Gil gil;
    if (epoch_ != epoch) {
      plans_.clear();
      epoch_ = epoch;
    }
    auto found = plans_.find(s.hash());
    if (found == plans_.end() || found->second.key.size() != s.key.size() ||
        !std::equal(s.key.begin(), s.key.end(), found->second.key.begin())) {
      teach = true;
      return false;
    }
    if (found->second.plan == nullptr) {
      return false;
    }
    const Plan& plan = *found->second.plan;
    auto* heap = reinterpret_cast<HeapFields*>(plan.program->heap);
    if (!is_usual(plan, heap)) {
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
    c10::SmallVector<c10::IValue, 4> returned;
    for (int64_t at : facts_.returned) {
      returned.push_back(torch::jit::peek(*stack, at, n));
    }
    torch::jit::drop(*stack, n);
    for (c10::IValue& value : returned) {
      stack->push_back(std::move(value));
    }
  }

  Facts facts_;
  c10::SafeKernelFunction python_;
  // Never freed: PyTorch ends its kernels after Python has ended.
  std::unordered_map<uint64_t, Learned>& plans_ = *new std::unordered_map<uint64_t, Learned>();
  uint64_t epoch_ = 0;
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

// `aten.linear` under autograd, for plain tensors (`wooly.kernels.layers.linear`): one instruction without gradients, PyTorch's
// decomposition with gradients.
class LinearKernel final : public c10::OperatorKernel {
 public:
  explicit LinearKernel(c10::SafeKernelFunction python) : python_(std::move(python)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    bool plain = enabled.load(std::memory_order_relaxed) && !c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::Python);
    bool gradients = false;
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
    }
    if (!plain || (gradients && !c10::GradMode::is_enabled())) {
      python_.callBoxed(op, keys, stack);
    } else if (gradients) {
      op.callBoxedForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd, *stack);
    } else {
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), stack);
    }
  }

 private:
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

c10::OperatorHandle operator_of(const char* name, const char* overload) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
}

PyObject* register_kernel(PyObject*, PyObject* args) {
  const char *name, *overload, *shown;
  PyObject *scalar, *keywords, *returned;
  int writes, list_return;
  if (!PyArg_ParseTuple(args, "sssO!O!O!pp", &name, &overload, &shown, &PyTuple_Type, &scalar, &PyFrozenSet_Type, &keywords,
                        &PyTuple_Type, &returned, &writes, &list_return)) {
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
  const auto key = c10::DispatchKey::PrivateUse1;
  put(op, key, std::make_unique<Kernel>(std::move(facts), op.getComputedKernelForDispatchKey(key)));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* register_view(PyObject*, PyObject* args) {
  const char *name, *overload;
  if (!PyArg_ParseTuple(args, "ss", &name, &overload)) {
    return nullptr;
  }
  HANDLE_TH_ERRORS
  auto op = operator_of(name, overload);
  const auto key = c10::DispatchKey::PrivateUse1;
  put(op, key, std::make_unique<ViewKernel>(op.getComputedKernelForDispatchKey(key)));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* register_linear(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  auto op = operator_of("aten::linear", "");
  const auto key = c10::DispatchKey::AutogradPrivateUse1;
  put(op, key, std::make_unique<LinearKernel>(op.getComputedKernelForDispatchKey(key)));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// Also puts the guard in place.
PyObject* set_up(PyObject*, PyObject* args) {
  PyObject *known_heaps, *asks;
  if (!PyArg_ParseTuple(args, "O!O", &PyTuple_Type, &known_heaps, &asks)) {
    return nullptr;
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(known_heaps) && i < kMaxDevices; ++i) {
    heaps[i] = reinterpret_cast<HeapFields*>(Py_NewRef(PyTuple_GET_ITEM(known_heaps, i)));
  }
  Py_XSETREF(is_library, Py_NewRef(asks));
  auto& registered = c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::kPrivateUse1)];
  registered.store(new Guard(registered.load())); // as long as the process
  Py_RETURN_NONE;
}

PyObject* forget(PyObject*, PyObject*) {
  ++epoch;
  n_plans = 0;
  Py_RETURN_NONE;
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

PyObject* counts(PyObject*, PyObject*) { return Py_BuildValue("KK", n_native.load(), n_python.load()); }

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
  plan->form = Ref(Py_NewRef(form));
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

PyObject* learn(PyObject*, PyObject* args) {
  const char* name;
  PyObject *program, *form, *outs, *written, *buffers, *params;
  if (!PyArg_ParseTuple(args, "sO!O!O!O!O!O!", &name, &ProgramType, &program, &PyLong_Type, &form, &PyTuple_Type, &outs,
                        &PyTuple_Type, &written, &PyList_Type, &buffers, &PyList_Type, &params)) {
    return nullptr;
  }
  if (pending.empty() || !pending.back().armed || pending.back().facts->name != name) {
    Py_RETURN_NONE;
  }
  Pending& call = pending.back();
  call.armed = false;
  try {
    if (n_plans >= kMaxPlans) {
      ++epoch;
      n_plans = 0;
      Py_RETURN_NONE;
    }
    const Signature& s = *call.signature;
    Learned& learned = (*call.plans)[s.hash()];
    learned.key.assign(s.key.begin(), s.key.end());
    learned.plan = nullptr;
    if (same_buffers(s, buffers) && same_params(s, params)) {
      learned.plan = plan_of(program, form, outs, written);
    }
    ++n_plans;
  } catch (const PythonFailure&) {
    return nullptr;
  }
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"register_kernel", register_kernel, METH_VARARGS, "Put a native kernel before the kernel in Python of an operator."},
    {"register_view", register_view, METH_VARARGS, "Let an operator on metadata run its CPU kernel."},
    {"register_linear", register_linear, METH_NOARGS, "Put a native kernel before the kernel in Python of aten.linear."},
    {"set_up", set_up, METH_VARARGS, "Set the heaps, and the function that says whether code belongs to a library."},
    {"learn", learn, METH_VARARGS, "Teach the kernel that called Python the plan of its call."},
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
  str_close_if_due = PyUnicode_InternFromString("close_if_due");
  str_drop_incomplete = PyUnicode_InternFromString("drop_incomplete");
  str_acquire = PyUnicode_InternFromString("acquire");
  str_release = PyUnicode_InternFromString("release");
  return module;
}

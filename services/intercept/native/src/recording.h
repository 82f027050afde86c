// Recording: storages of results, the lines of calls, and the instructions of plans that Python has taught. All of it needs the
// interpreter lock (GIL).
#pragma once

#define PY_SSIZE_T_CLEAN
#include <memory>
#include <unordered_map>
#include <vector>

#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>

#include "fields.h"
#include "signature.h"

namespace wooly {

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

inline void must(bool fine) {
  if (!fine) {
    throw PythonFailure();
  }
}

inline PyObject* made(PyObject* object) {
  must(object != nullptr);
  return object;
}

[[noreturn]] inline void raise_python_error() {
  python_error error;
  error.persist();
  throw std::move(error);
}

// -- storages -------------------------------------------------------------------------------------------------------------

inline HeapFields* heaps[kMaxDevices] = {};

// The deleter of a storage. Its context is the storage's entry of `dead`. It may run in any thread, and while an error is set.
inline void free_storage(void* context) {
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
inline at::Tensor make_tensor(HeapFields* heap, const Layout& layout, unsigned long long id) {
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

inline PyObject* is_library = nullptr; // asks Python whether a code object belongs to a library
inline std::unordered_map<PyObject*, bool> library_code;
inline struct LastOrigin {
  PyObject* code = nullptr;
  int at = -1;
  PyObject* origin = nullptr;
} last_origin;

// The innermost Python line that is not in a library (`wooly.origins.origin`), outside of the `skipped` innermost frames. If all
// are in libraries, the innermost one of those; if there are not so many frames, of all. Returns a borrowed reference, or null if
// no Python runs.
inline PyObject* find_origin(int skipped = 0) {
  PyFrameObject* frame = PyEval_GetFrame();
  if (frame == nullptr) {
    return nullptr;
  }
  Ref holder;
  for (Ref outer; skipped > 0; --skipped) {
    outer = Ref(reinterpret_cast<PyObject*>(PyFrame_GetBack(frame)));
    if (outer.object == nullptr) {
      return find_origin();
    }
    holder = std::move(outer);
    frame = reinterpret_cast<PyFrameObject*>(holder.object);
  }
  Ref kept(Py_XNewRef(holder.object)); // `first` stays alive
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
  Ref form;           // null: a factory, whose call is no instruction
  bool copies = false; // the first tensor becomes a copy of the second one, which the instruction names first
  std::vector<std::unique_ptr<Layout>> outs; // null: the operator returns an undefined tensor
  std::vector<size_t> written;               // positions of the buffers that the call writes
  std::vector<std::pair<size_t, size_t>> apart; // pairs of operands that would overlap in one buffer
};

// Names of attributes and methods, made when the module is loaded.
inline PyObject *str_mirrors, *str_forget, *str_overwrite, *str_close_if_due, *str_drop_incomplete, *str_acquire, *str_release;

inline void append(PyObject* list, PyObject* item) { must(PyList_Append(list, item) == 0); }

inline PyObject* param_object(const Param& p) {
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
inline PyObject* mirrors_of(ProgramFields* program) {
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

inline bool has_mirror(ProgramFields* program, PyObject* buffer) {
  PyObject* mirrors = mirrors_of(program);
  if (mirrors == nullptr) {
    return false;
  }
  int kept = PyDict_Contains(mirrors, buffer);
  must(kept >= 0);
  return kept != 0;
}

// `Link.forget` of a buffer that was freed.
inline void forget_mirror(ProgramFields* program, PyObject* buffer) {
  if (has_mirror(program, buffer)) {
    Ref(made(PyObject_CallMethodOneArg(program->link, str_forget, buffer)));
  }
}

// `Link.overwrite` of a buffer that the next instruction writes.
inline void overwrite_mirror(ProgramFields* program, PyObject* buffer) {
  if (has_mirror(program, buffer)) {
    Ref instructions(made(PyLong_FromSsize_t(PyList_GET_SIZE(program->origins))));
    Ref(made(PyObject_CallMethodObjArgs(program->link, str_overwrite, buffer, instructions.object, nullptr)));
  }
}

// The slot of a buffer in the open program. Returns a borrowed reference.
inline PyObject* slot_of(ProgramFields* program, PyObject* buffer) {
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
inline void release_dead(ProgramFields* program, HeapFields* heap) {
  for (Py_ssize_t n; (n = PyList_GET_SIZE(heap->dead)) > 0;) {
    auto entry = PyLong_AsUnsignedLongLong(PyList_GET_ITEM(heap->dead, n - 1));
    must(!PyErr_Occurred() && PyList_SetSlice(heap->dead, n - 1, n, nullptr) == 0);
    Ref buffer(made(PyLong_FromUnsignedLongLong(entry & kIdMask)));
    Ref slot(Py_XNewRef(PyDict_GetItemWithError(program->slot_of, buffer)));
    if (slot.object == nullptr) {
      must(!PyErr_Occurred());
      append(program->frees, buffer);
      forget_mirror(program, buffer);
    } else {
      must(PyDict_DelItem(program->slot_of, buffer) == 0);
      append(program->words, program->free_form);
      append(program->words, slot);
      append(program->origins, PyList_GET_ITEM(program->origins, PyList_GET_SIZE(program->origins) - 1));
      append(program->freed, buffer);
    }
  }
}

inline void close_if_due(ProgramFields* program, PyObject* form) {
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
inline bool is_usual(const Plan& plan, const HeapFields* heap, const Signature& s) {
  const ProgramFields* program = plan.program;
  if (program->replaced || heap->observed || program->link == Py_None) {
    return false;
  }
  if (plan.copies && s.buffers[0] == s.buffers[1]) {
    return false; // Python looks whether the two overlap
  }
  for (auto [a, b] : plan.apart) {
    if (s.buffers[a] == s.buffers[b]) {
      return false; // Python looks whether the operator allows it
    }
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
  return heap->held_bytes + nbytes <= heap->granted && PyList_GET_SIZE(heap->reusable) + kMaxStorages - heap->next >= n;
}

// `Heap.reserve_id`, where `is_usual` has found that there is an id.
inline Ref reserve_id(HeapFields* heap) {
  const Py_ssize_t n = PyList_GET_SIZE(heap->reusable);
  if (n == 0) {
    Ref fresh(made(PyLong_FromLongLong((heap->next + 1) << kDeviceBits | heap->index)));
    heap->next += 1;
    return fresh;
  }
  Ref buffer(Py_NewRef(PyList_GET_ITEM(heap->reusable, n - 1)));
  must(PyList_SetSlice(heap->reusable, n - 1, n, nullptr) == 0);
  return buffer;
}

// Record one call. The caller holds the interpreter lock and the recorder's lock.
inline void record(const Plan& plan, HeapFields* heap, const Signature& s, PyObject* origin, std::vector<at::Tensor>& results) {
  ProgramFields* program = plan.program;
  if (PyList_GET_SIZE(heap->dead)) {
    release_dead(program, heap);
  }
  if (plan.form.object != nullptr) {
    program->operations += 1;
  }
  for (const Param& p : s.params) {
    Ref value(made(param_object(p)));
    append(program->params, value);
  }
  c10::SmallVector<Ref, 8> buffers;
  for (int64_t id : s.buffers) {
    buffers.emplace_back(made(PyLong_FromLongLong(id)));
  }
  for (size_t at : plan.written) {
    overwrite_mirror(program, buffers[at]);
  }
  for (const auto& out : plan.outs) {
    if (out == nullptr) {
      results.emplace_back();
      continue;
    }
    buffers.push_back(reserve_id(heap));
    PyObject* buffer = buffers.back();
    results.push_back(make_tensor(heap, *out, PyLong_AsUnsignedLongLong(buffer)));
    append(program->words, out->alloc_form);
    append(program->words, slot_of(program, buffer));
    append(program->origins, origin);
  }
  if (plan.form.object == nullptr) {
    close_if_due(program, plan.outs.back()->alloc_form);
    return;
  }
  if (plan.copies) {
    std::swap(buffers[0].object, buffers[1].object);
  }
  append(program->words, plan.form);
  for (const Ref& buffer : buffers) {
    append(program->words, slot_of(program, buffer));
  }
  append(program->origins, origin);
  close_if_due(program, plan.form);
}

} // namespace wooly

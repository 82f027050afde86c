#include "fields.h"

#include <cstddef>
#include <structmember.h>

namespace wooly {

namespace {

int visit_heap(PyObject* self, visitproc visit, void* arg) {
  auto* heap = reinterpret_cast<HeapFields*>(self);
  Py_VISIT(heap->dead);
  Py_VISIT(heap->kept);
  Py_VISIT(heap->reusable);
  Py_VISIT(heap->tell_free);
  return 0;
}

int clear_heap(PyObject* self) {
  auto* heap = reinterpret_cast<HeapFields*>(self);
  Py_CLEAR(heap->dead);
  Py_CLEAR(heap->kept);
  Py_CLEAR(heap->reusable);
  Py_CLEAR(heap->tell_free);
  return 0;
}

int visit_program(PyObject* self, visitproc visit, void* arg) {
  auto* program = reinterpret_cast<ProgramFields*>(self);
  for (PyObject** at = &program->lock; at <= &program->free_form; ++at) {
    Py_VISIT(*at);
  }
  return 0;
}

int clear_program(PyObject* self) {
  auto* program = reinterpret_cast<ProgramFields*>(self);
  for (PyObject** at = &program->lock; at <= &program->free_form; ++at) {
    Py_CLEAR(*at);
  }
  return 0;
}

template <int (*clear)(PyObject*)>
void deallocate(PyObject* self) {
  PyObject_GC_UnTrack(self);
  clear(self);
  Py_TYPE(self)->tp_free(self);
}

#define NUMBER(type, name) {#name, T_LONGLONG, offsetof(type, name), 0, nullptr}
#define OBJECT(type, name) {#name, T_OBJECT_EX, offsetof(type, name), 0, nullptr}
#define HIDDEN(type, name) {"_" #name, T_OBJECT_EX, offsetof(type, name), 0, nullptr}

PyMemberDef heap_members[] = {
    NUMBER(HeapFields, index),
    {"_next", T_LONGLONG, offsetof(HeapFields, next), 0, nullptr},
    NUMBER(HeapFields, live),
    NUMBER(HeapFields, live_bytes),
    NUMBER(HeapFields, peak_bytes),
    NUMBER(HeapFields, peak_live),
    NUMBER(HeapFields, held_bytes),
    NUMBER(HeapFields, granted),
    {"observed", T_BOOL, offsetof(HeapFields, observed), 0, nullptr},
    OBJECT(HeapFields, dead),
    OBJECT(HeapFields, kept),
    HIDDEN(HeapFields, reusable),
    OBJECT(HeapFields, tell_free),
    {nullptr, 0, 0, 0, nullptr},
};

PyMemberDef program_members[] = {
    NUMBER(ProgramFields, operations),
    NUMBER(ProgramFields, room),
    {"_open_limit", T_LONGLONG, offsetof(ProgramFields, open_limit), 0, nullptr},
    {"replaced", T_BOOL, offsetof(ProgramFields, replaced), 0, nullptr},
    OBJECT(ProgramFields, lock),
    OBJECT(ProgramFields, heap),
    OBJECT(ProgramFields, link),
    OBJECT(ProgramFields, capture),
    OBJECT(ProgramFields, words),
    OBJECT(ProgramFields, bind),
    OBJECT(ProgramFields, slot_of),
    OBJECT(ProgramFields, params),
    OBJECT(ProgramFields, origins),
    HIDDEN(ProgramFields, frees),
    HIDDEN(ProgramFields, freed),
    HIDDEN(ProgramFields, end_forms),
    HIDDEN(ProgramFields, closed_at_end_form),
    HIDDEN(ProgramFields, free_form),
    {nullptr, 0, 0, 0, nullptr},
};

PyTypeObject make_type(const char* name, const char* doc, Py_ssize_t size, PyMemberDef* members, traverseproc visit,
                       inquiry clear, destructor dealloc) {
  PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};
  type.tp_name = name;
  type.tp_doc = doc;
  type.tp_basicsize = size;
  type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC;
  type.tp_members = members;
  type.tp_traverse = visit;
  type.tp_clear = clear;
  type.tp_dealloc = dealloc;
  type.tp_new = PyType_GenericNew;
  return type;
}

} // namespace

PyTypeObject HeapType = make_type("wooly_native.HeapFields", "Fields of `wooly.storage.Heap`.", sizeof(HeapFields),
                                  heap_members, visit_heap, clear_heap, deallocate<clear_heap>);
PyTypeObject ProgramType = make_type("wooly_native.ProgramFields", "Fields of `wooly.recorder.Recorder`.",
                                     sizeof(ProgramFields), program_members, visit_program, clear_program,
                                     deallocate<clear_program>);

bool add_fields(PyObject* module) {
  return PyType_Ready(&HeapType) == 0 && PyType_Ready(&ProgramType) == 0 &&
         PyModule_AddObjectRef(module, "HeapFields", reinterpret_cast<PyObject*>(&HeapType)) == 0 &&
         PyModule_AddObjectRef(module, "ProgramFields", reinterpret_cast<PyObject*>(&ProgramType)) == 0;
}

} // namespace wooly

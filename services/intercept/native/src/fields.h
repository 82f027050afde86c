// The fields of a heap and of an open program, as C structs. Python classes derive from these types, so Python code reads and
// writes the same fields as attributes. All access needs the interpreter lock (GIL). This file does not depend on PyTorch.
#pragma once

#include <Python.h>

namespace wooly {

// Position of the buffer id in an address; the bits below contain the byte offset (`wooly.storage.ID_SHIFT`).
constexpr int kIdShift = 40;
// Bits of a buffer id (`wooly.storage.ID_MASK`). An entry of `dead` is `bytes << kIdBits | id`.
constexpr int kIdBits = 24;
constexpr unsigned long long kIdMask = (1ULL << kIdBits) - 1;
// Bits of a buffer id that contain the device.
constexpr int kDeviceBits = 3;
constexpr int kMaxDevices = 1 << kDeviceBits;
// Maximum number of storages of a device that live at a time (`wooly.storage.MAX_STORAGES`).
constexpr long long kMaxStorages = (1LL << (kIdBits - kDeviceBits)) - 1;
// Bits of an address that are part of a signature: byte offset and device (`wooly.storage.PLACE_MASK`).
constexpr unsigned long long kPlaceMask = (1ULL << (kIdShift + kDeviceBits)) - 1;

// The base of `wooly.storage.Heap`.
struct HeapFields {
  PyObject_HEAD
  long long index, next, live, live_bytes, peak_bytes, peak_live, held_bytes, granted;
  char observed;
  PyObject* dead;      // list
  PyObject* kept;      // dict
  PyObject* reusable;  // list
  PyObject* tell_free; // called with an entry of `dead` in place of appending it, while the heap has observers
};

// The base of `wooly.recorder.Recorder`.
struct ProgramFields {
  PyObject_HEAD
  long long operations, room, open_limit;
  char replaced; // `emit` is replaced, so only Python may record
  PyObject* lock;
  PyObject* heap;
  PyObject* link;
  PyObject* capture;
  PyObject* words;     // list
  PyObject* bind;      // list
  PyObject* slot_of;   // dict
  PyObject* params;    // list
  PyObject* origins;   // list
  PyObject* frees;     // list
  PyObject* freed;     // list
  PyObject* end_forms; // set
  PyObject* closed_at_end_form;
  PyObject* free_form; // int
};

extern PyTypeObject HeapType;
extern PyTypeObject ProgramType;

// Prepare both types and add them to the module. Returns false with a Python error.
bool add_fields(PyObject* module);

} // namespace wooly

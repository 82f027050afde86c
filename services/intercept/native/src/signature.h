// The signature of a call: everything about its arguments except the buffers and the scalars that become params. Two calls with
// equal native signatures have equal signatures in Python (`wooly.kernels.generic`); the reverse need not hold. No function here
// needs the interpreter lock.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <c10/util/SmallVector.h>

#include "fields.h"

namespace wooly {

// A scalar that becomes a param.
struct Param {
  enum Kind : int64_t { kFloat = 1, kInt, kBool } kind;
  union {
    double real;
    int64_t integer;
  };
};

struct Signature {
  c10::SmallVector<int64_t, 72> key;
  c10::SmallVector<int64_t, 8> buffers;
  c10::SmallVector<Param, 4> params;
  at::ScalarType first = at::ScalarType::Undefined; // dtype of the first argument, or of the first tensor in its list

  uint64_t hash() const {
    uint64_t h = 0x9E3779B97F4A7C15ULL + key.size();
    for (int64_t word : key) {
      h = (h ^ static_cast<uint64_t>(word)) * 0xD6E8FEB86659FD93ULL;
      h ^= h >> 32;
    }
    return h;
  }
};

// What a kernel knows about its operator.
struct Facts {
  std::string name;             // as Python writes it, for example `aten.add.Tensor`
  std::vector<char> scalar;     // per argument, whether a number there becomes a param
  std::vector<int64_t> returned; // per result, the argument that is returned; -1: a new tensor
  bool writes = false;          // whether the operator writes an argument
  bool list_return = false;     // whether the result is a list of tensors
  bool factory = false;         // whether calls have no tensors
  bool counts_changes = false;  // whether the kernel counts the changes of the lists that the operator writes
  // Whether the operator multiplies with weights, and the library chooses the product by whether they require gradients.
  enum Product { kNone, kLinear, kRecurrent } product = kNone;
  size_t keyword_from = 0;      // position of the first keyword-only argument
};

// Words that start an entry of a key. An entry is self-delimiting, so keys of different calls differ.
enum Tag : int64_t { kTensor = 1, kNumber, kNone, kOmitted, kParam, kConstant, kInts, kBools, kFloats, kTensors, kText, kPlace,
                     kDoubtful };

inline bool is_plain(const at::TensorImpl* t) {
  // Conjugate and negative views, zero tensors, subclasses, sparse and nested tensors and the like have other keys than these.
  auto rest = t->key_set() - c10::autograd_dispatch_keyset_with_ADInplaceOrView - c10::autocast_dispatch_keyset;
  return rest == c10::DispatchKeySet(c10::DispatchKey::PrivateUse1) && !t->has_symbolic_sizes_strides() &&
         t->has_storage() && t->layout() == c10::kStrided;
}

inline bool is_plain_host(const at::TensorImpl* t) {
  auto rest = t->key_set() - c10::autograd_dispatch_keyset_with_ADInplaceOrView - c10::autocast_dispatch_keyset;
  return rest == c10::DispatchKeySet(c10::DispatchKey::CPU) && t->has_storage() && t->dim() == 0;
}

// As `wooly.storage.address_of`. Without a buffer id, it is no storage of this device.
inline uint64_t address_of(const at::TensorImpl* t) {
  auto begin = reinterpret_cast<uint64_t>(t->unsafe_storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get());
  return begin + static_cast<uint64_t>(t->storage_offset()) * t->dtype().itemsize();
}

inline bool add_device_tensor(const at::TensorImpl* t, Signature& s) {
  const auto address = address_of(t);
  if (!(address >> kIdShift)) {
    return false; // not a storage of this device
  }
  auto sizes = t->sizes();
  auto strides = t->strides();
  if (s.key.empty() || (s.key.size() == 1 && (s.key[0] & 0xFF) == kTensors)) {
    s.first = t->dtype().toScalarType();
  }
  s.key.push_back(kTensor | static_cast<int64_t>(t->dtype().toScalarType()) << 8 | static_cast<int64_t>(sizes.size()) << 16);
  s.key.append(sizes.begin(), sizes.end());
  s.key.append(strides.begin(), strides.end());
  s.key.push_back(static_cast<int64_t>(address & kPlaceMask));
  s.buffers.push_back(static_cast<int64_t>(address >> kIdShift));
  return true;
}

// A host tensor with one number: its value becomes a param.
inline bool add_host_number(const at::TensorImpl* t, Signature& s) {
  const void* at = t->data();
  Param p{};
  switch (t->dtype().toScalarType()) {
    case at::kDouble:
      p.kind = Param::kFloat, p.real = *static_cast<const double*>(at);
      break;
    case at::kFloat:
      p.kind = Param::kFloat, p.real = *static_cast<const float*>(at);
      break;
    case at::kBFloat16:
      p.kind = Param::kFloat, p.real = static_cast<float>(*static_cast<const c10::BFloat16*>(at));
      break;
    case at::kHalf:
      p.kind = Param::kFloat, p.real = static_cast<float>(*static_cast<const c10::Half*>(at));
      break;
    case at::kLong:
      p.kind = Param::kInt, p.integer = *static_cast<const int64_t*>(at);
      break;
    case at::kInt:
      p.kind = Param::kInt, p.integer = *static_cast<const int32_t*>(at);
      break;
    case at::kBool:
      p.kind = Param::kBool, p.integer = *static_cast<const bool*>(at);
      break;
    default:
      return false;
  }
  s.key.push_back(kNumber | static_cast<int64_t>(t->dtype().toScalarType()) << 8 |
                  static_cast<int64_t>(t->is_wrapped_number()) << 16);
  s.params.push_back(p);
  return true;
}

inline bool add_tensor(const at::Tensor& tensor, Signature& s) {
  const at::TensorImpl* t = tensor.unsafeGetTensorImpl();
  if (!tensor.defined()) {
    s.key.push_back(kNone);
    return true;
  }
  if (is_plain(t)) {
    return add_device_tensor(t, s);
  }
  return is_plain_host(t) && add_host_number(t, s);
}

inline int64_t bits_of(double d) {
  int64_t word = 0;
  std::memcpy(&word, &d, sizeof word);
  return word;
}

inline bool add_number(const c10::IValue& a, bool becomes_param, Signature& s) {
  Param p{};
  if (a.isDouble()) {
    p.kind = Param::kFloat, p.real = a.toDouble();
  } else if (a.isInt()) {
    p.kind = Param::kInt, p.integer = a.toInt();
  } else {
    p.kind = Param::kBool, p.integer = a.toBool();
  }
  if (becomes_param) {
    s.key.push_back(kParam | p.kind << 8);
    s.params.push_back(p);
  } else {
    s.key.push_back(kConstant | p.kind << 8);
    s.key.push_back(p.kind == Param::kFloat ? bits_of(p.real) : p.integer);
  }
  return true;
}

inline void add_text(const std::string& text, Signature& s) {
  s.key.push_back(kText | static_cast<int64_t>(text.size()) << 8);
  for (size_t at = 0; at < text.size(); at += 8) {
    int64_t word = 0;
    std::memcpy(&word, text.data() + at, std::min<size_t>(8, text.size() - at));
    s.key.push_back(word);
  }
}

// Add one argument. Returns false if only Python may handle the call.
inline bool add_argument(const c10::IValue& a, bool becomes_param, Signature& s) {
  if (a.isTensor()) {
    return add_tensor(a.unsafeToTensorImpl() == nullptr ? at::Tensor() : a.toTensor(), s);
  }
  if (a.isNone()) {
    s.key.push_back(kNone);
    return true;
  }
  if (a.isDouble() || a.isInt() || a.isBool()) {
    return add_number(a, becomes_param, s);
  }
  if (a.isIntList() && !becomes_param) {
    auto list = a.toIntList();
    s.key.push_back(kInts | static_cast<int64_t>(list.size()) << 8);
    for (const auto& x : list) {
      s.key.push_back(static_cast<int64_t>(x.get().toInt()));
    }
    return true;
  }
  if (a.isBoolList()) {
    auto list = a.toBoolList();
    s.key.push_back(kBools | static_cast<int64_t>(list.size()) << 8);
    for (const auto& x : list) {
      s.key.push_back(static_cast<bool>(x.get().toBool()));
    }
    return true;
  }
  if (a.isDoubleList() && !becomes_param) {
    auto list = a.toDoubleList();
    s.key.push_back(kFloats | static_cast<int64_t>(list.size()) << 8);
    for (const auto& x : list) {
      s.key.push_back(bits_of(x.get().toDouble()));
    }
    return true;
  }
  if (a.isTensorList()) {
    auto list = a.toListRef();
    s.key.push_back(kTensors | static_cast<int64_t>(list.size()) << 8);
    for (const c10::IValue& x : list) {
      if (!add_tensor(x.toTensor(), s)) {
        return false;
      }
    }
    return true;
  }
  if (a.isOptionalTensorList()) {
    auto list = a.toListRef();
    s.key.push_back(kTensors | static_cast<int64_t>(list.size()) << 8);
    for (const c10::IValue& x : list) {
      if (x.isNone()) {
        s.key.push_back(kNone);
      } else if (!add_tensor(x.toTensor(), s)) {
        return false;
      }
    }
    return true;
  }
  if (a.isString()) {
    add_text(a.toStringRef(), s);
    return true;
  }
  if (a.isDevice()) {
    auto device = a.toDevice();
    s.key.push_back(kPlace | static_cast<int64_t>(device.type()) << 8 | static_cast<int64_t>(device.index() + 1) << 16);
    return true;
  }
  return false;
}

inline bool is_default(const c10::Argument& declared, const c10::IValue& a) {
  const auto& value = declared.default_value();
  if (!value.has_value()) {
    return false;
  }
  if (value->isInt()) {
    return a.isInt() && a.toInt() == value->toInt();
  }
  if (value->isBool()) {
    return a.isBool() && a.toBool() == value->toBool();
  }
  if (value->isNone()) {
    return a.isNone();
  }
  return *value == a;
}

// Add how the numbers are related to the dtype of the first argument, if one of them may not fit into it. As `wooly.kernels.limits`.
inline void add_doubts(Signature& s) {
  long double low = 0, least = 0, most = 0; // exact for each integer and each double
  const auto integers = [&](auto limits) {
    most = limits.max();
    least = limits.is_signed ? static_cast<long double>(limits.min()) : -most;
  };
  switch (s.first) {
    case at::kByte: integers(std::numeric_limits<uint8_t>()); break;
    case at::kUInt16: integers(std::numeric_limits<uint16_t>()); break;
    case at::kUInt32: integers(std::numeric_limits<uint32_t>()); break;
    case at::kUInt64: integers(std::numeric_limits<uint64_t>()); break;
    case at::kChar: integers(std::numeric_limits<int8_t>()); break;
    case at::kShort: integers(std::numeric_limits<int16_t>()); break;
    case at::kInt: integers(std::numeric_limits<int32_t>()); break;
    case at::kLong: integers(std::numeric_limits<int64_t>()); break;
    case at::kHalf: most = std::numeric_limits<c10::Half>::max(); low = least = -most; break;
    case at::kBFloat16: most = std::numeric_limits<c10::BFloat16>::max(); low = least = -most; break;
    case at::kFloat: case at::kComplexFloat: most = std::numeric_limits<float>::max(); low = least = -most; break;
    default: return;
  }
  const size_t before = s.key.size();
  bool any = false;
  s.key.push_back(kDoubtful);
  for (const Param& p : s.params) {
    const long double x = p.kind == Param::kFloat ? static_cast<long double>(p.real) : static_cast<long double>(p.integer);
    int64_t found = 0;
    if (low != 0) {
      found = (least <= x && x <= most) || std::isnan(x) || std::isinf(x) ? 0 : 2;
    } else {
      const bool wraps = least == -most && p.kind == Param::kFloat; // an unsigned dtype takes no negative float
      found = 0 <= x && x <= most ? 0 : least <= x && x < 0 && !wraps ? 1 : 2;
    }
    any = any || found != 0;
    s.key.push_back(found);
  }
  if (!any) {
    s.key.resize(before);
  }
}

// Compute the signature of a call. Returns false if only Python may handle the call.
//
// PyTorch does not pass arguments to a kernel in Python that have their default: at the end of the positional ones, and any
// keyword-only one. Such numbers are not params, so the signature says which arguments are omitted.
inline bool sign(const Facts& facts, const c10::FunctionSchema& schema, const torch::jit::Stack& stack, Signature& s) {
  const auto& declared = schema.arguments();
  const size_t n = declared.size();
  const c10::IValue* args = stack.data() + (stack.size() - n);
  size_t positional = std::min(facts.keyword_from, n);
  while (positional > 0 && is_default(declared[positional - 1], args[positional - 1])) {
    --positional;
  }
  for (size_t i = 0; i < n; ++i) {
    const bool omitted = i < facts.keyword_from ? i >= positional : is_default(declared[i], args[i]);
    if (omitted) {
      s.key.push_back(kOmitted);
    } else if (!add_argument(args[i], facts.scalar[i] != 0, s)) {
      return false;
    }
  }
  if (!s.params.empty()) {
    add_doubts(s);
  }
  return facts.factory || !s.buffers.empty();
}

} // namespace wooly

// Elements in memory to and from the type that a kernel computes in.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/params.h"

namespace kda::cuda {

template <class T>
struct Element {
  using Type = T;
};

/// Calls f(Element<T>{}) with the element type behind a value of kda::DType. The branch is uniform
/// and stands outside the loops over elements.
template <class F>
__device__ __forceinline__ void with_element(int32_t dtype, F f) {
  switch (dtype) {
    case 1:
      return f(Element<__nv_bfloat16>{});
    case 2:
      return f(Element<__half>{});
    case 3:
      return f(Element<float>{});
    default:
      return f(Element<double>{});
  }
}

template <class Real, class T>
__device__ __forceinline__ Real to_real(T x) {
  return static_cast<Real>(x);
}
template <class Real>
__device__ __forceinline__ Real to_real(__nv_bfloat16 x) {
  return static_cast<Real>(__bfloat162float(x));
}
template <class Real>
__device__ __forceinline__ Real to_real(__half x) {
  return static_cast<Real>(__half2float(x));
}

template <class T, class Real>
__device__ __forceinline__ T from_real(Real x) {
  if constexpr (sizeof(T) == 2) {
    if constexpr (__is_same(T, __half))
      return __float2half_rn(static_cast<float>(x));
    else
      return __float2bfloat16_rn(static_cast<float>(x));
  } else {
    return static_cast<T>(x);
  }
}

template <class Real>
__device__ __forceinline__ Real load(const Tensor& tensor, int64_t offset) {
  Real value{};
  with_element(tensor.dtype, [&]<class T>(Element<T>) {
    value = to_real<Real>(static_cast<const T*>(tensor.data)[offset]);
  });
  return value;
}

template <class Real>
__device__ __forceinline__ void store(const Tensor& tensor, int64_t offset, Real value) {
  with_element(tensor.dtype, [&]<class T>(Element<T>) {
    static_cast<T*>(tensor.data)[offset] = from_real<T>(value);
  });
}

/// The bits of an element, to be converted later: between a load and its conversion other loads can
/// be issued, although the conversions branch on the dtype.
template <class Real>
struct RawElement;
template <>
struct RawElement<float> {
  uint32_t bits;  ///< no fp64
};
template <>
struct RawElement<double> {
  uint64_t bits;
};

template <class Real>
__device__ __forceinline__ RawElement<Real> load_raw(const Tensor& t, int64_t offset) {
  if (t.dtype <= 2) return {static_cast<const uint16_t*>(t.data)[offset]};
  if (sizeof(Real) == 4 || t.dtype == 3) return {static_cast<const uint32_t*>(t.data)[offset]};
  return {
      static_cast<decltype(RawElement<Real>::bits)>(static_cast<const uint64_t*>(t.data)[offset])};
}

template <class Real>
__device__ __forceinline__ Real convert(RawElement<Real> raw, int32_t dtype) {
  if (dtype == 1) return to_real<Real>(__ushort_as_bfloat16(static_cast<uint16_t>(raw.bits)));
  if (dtype == 2) return to_real<Real>(__ushort_as_half(static_cast<uint16_t>(raw.bits)));
  const float as_float = __uint_as_float(static_cast<uint32_t>(raw.bits));
  if constexpr (sizeof(Real) == 8) {
    if (dtype == 4) return __longlong_as_double(static_cast<int64_t>(raw.bits));
  }
  return static_cast<Real>(as_float);
}

/// Element i of an int32 (value 5 of kda::DType) or int64 tensor.
__device__ __forceinline__ int64_t load_index(const Tensor& tensor, int64_t i) {
  const int64_t offset = i * tensor.stride[0];
  if (tensor.dtype == 5) return static_cast<const int32_t*>(tensor.data)[offset];
  return static_cast<const int64_t*>(tensor.data)[offset];
}

}  // namespace kda::cuda

// What both kernels of attention receive.
#pragma once
#include "device.cuh"

namespace sdonnx {

// A score that is masked, and the maximum of no scores: far below all sums of products of fp16, and finite, so that the
// difference of two of them is a number.
constexpr float kMasked = -1e30f;

struct AttentionArgs {
  const half *q, *k, *v;
  half* y;
  const int* counts;  // keys of each image that are not padding; null: all
  int batch, query_images, queries, keys, heads, head_size;  // query_images divides batch: the copies have one query
  int stride;  // from a token of q, k and v to the next; heads * head_size unless the three are packed
  float scale;  // times log2(e): the softmax takes powers of 2
  bool aligned;
};

// The first element of a head of a token, in a tensor (B,T,N*HEAD); of q, k and v with their stride.
template <int HEAD>
__device__ __forceinline__ size_t row_offset(const AttentionArgs& a, int image, int length, int token, int head) {
  return ((size_t(image) * length + token) * a.heads + head) * HEAD;
}
template <int HEAD>
__device__ __forceinline__ size_t input_offset(const AttentionArgs& a, int image, int length, int token, int head) {
  return (size_t(image) * length + token) * a.stride + head * HEAD;
}

}  // namespace sdonnx

// sdonnx_add_low_rank: weights on the device plus products of low rank, as a LoRA changes them, in one launch.
//
// It is no operator: the run-time calls it between images (sdonnx/runtime/device/low_rank_kernel.py). For each channel c
// and input i of a part of a weight it computes, in float32,
//
//     out[c, i] = base[c, i] + sum over terms of sum over r of scale * up[c, r] * down[r, i]
//
// and rounds once. `base` and `out` may be the same memory. The order of the sums depends on the terms alone, so that the
// same terms give the same bits. The largest magnitude of each weight is written as well; one that is infinite or not a
// number counts as infinite.
#include "../src/device.cuh"

#define SDONNX_EXPORT extern "C" __attribute__((visibility("default")))

namespace sdonnx {

// As `_PART` and `_TERM` of sdonnx/runtime/device/low_rank_kernel.py.
struct LowRankPart {
  const void* base;
  void* out;
  int64_t channel_stride, input_stride;  // in numbers; one of them is 1
  int32_t channels, inputs;
  int32_t first_channel;      // of the factors
  int32_t first_term, terms;
  int32_t weight;             // index of the magnitude
  int32_t first_tile;         // of all tiles
  int32_t is_half;            // fp16, otherwise float32
};
struct LowRankTerm {
  const void* up;    // (channels of the weight, rank)
  const void* down;  // (rank, inputs)
  int32_t rank;
  float scale;
  int32_t up_is_half, down_is_half;
};
static_assert(sizeof(LowRankPart) == 64 && sizeof(LowRankTerm) == 32, "numpy has the same layout");

constexpr int kTile = 64;    // rows and columns that a block computes
constexpr int kDepth = 16;   // ranks that are in shared memory at a time
constexpr int kEdge = 4;     // rows and columns of a thread
constexpr int kLowRankThreads = (kTile / kEdge) * (kTile / kEdge);
constexpr int kPadded = kTile + 4;

__device__ __forceinline__ float number(const void* values, int64_t at, bool is_half) {
  if (!is_half) return static_cast<const float*>(values)[at];
  const half value = static_cast<const half*>(values)[at];
  return __half22float2(half2{value, value}).x;
}
__device__ __forceinline__ void write_number(void* values, int64_t at, float value, bool is_half) {
  if (is_half)
    static_cast<half*>(values)[at] = __floats2half2_rn(value, value).x;
  else
    static_cast<float*>(values)[at] = value;
}
// The larger of two numbers that are not negative, which have the order of their bits.
__device__ __forceinline__ void raise_to(float* target, float value) {
#ifdef SDONNX_EMULATION
  *target = fmaxf(*target, value);
#else
  atomicMax(reinterpret_cast<int*>(target), __float_as_int(value));
#endif
}

// A block computes a tile of the matrix whose rows are the dimension with the larger stride.
__global__ void __launch_bounds__(kLowRankThreads)
    low_rank_kernel(const LowRankPart* parts, int count, const LowRankTerm* terms, float* magnitudes, bool writes) {
  prior_kernels_wait();
  const int tile = int(blockIdx.x);
  int low = 0, high = count - 1;  // the last part whose first tile is not behind this one
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (parts[middle].first_tile <= tile)
      low = middle;
    else
      high = middle - 1;
  }
  const LowRankPart part = parts[low];
  const bool by_channel = part.input_stride == 1;  // a row is a channel
  const int rows = by_channel ? part.channels : part.inputs, columns = by_channel ? part.inputs : part.channels;
  const int64_t row_stride = by_channel ? part.channel_stride : part.input_stride;
  const int across = (columns + kTile - 1) / kTile, local = tile - part.first_tile;
  const int first_row = local / across * kTile, first_column = local % across * kTile;
  float(*left)[kPadded] = reinterpret_cast<float(*)[kPadded]>(shared_memory());
  float(*right)[kPadded] = left + kDepth;
  const int thread = int(threadIdx.x), row = thread / (kTile / kEdge) * kEdge, column = thread % (kTile / kEdge) * kEdge;
  float sums[kEdge][kEdge] = {};
  for (int t = 0; t < part.terms; t++) {
    const LowRankTerm term = terms[part.first_term + t];
    for (int first = 0; first < term.rank; first += kDepth) {
      block_sync();
      for (int i = thread; i < kDepth * kTile; i += kLowRankThreads) {
        // Neighboring threads read neighboring numbers: ranks of `up`, inputs of `down`.
        const int up_rank = first + i % kDepth, up_at = i / kDepth;
        const int down_rank = first + i / kTile, down_at = i % kTile;
        const int channel = up_at + (by_channel ? first_row : first_column);
        const int input = down_at + (by_channel ? first_column : first_row);
        const bool has_up = up_rank < term.rank && channel < part.channels;
        const bool has_down = down_rank < term.rank && input < part.inputs;
        const int64_t of_up = int64_t(part.first_channel + channel) * term.rank + up_rank;
        const int64_t of_down = int64_t(down_rank) * part.inputs + input;
        const float up = has_up ? number(term.up, of_up, term.up_is_half) * term.scale : 0.0f;
        const float down = has_down ? number(term.down, of_down, term.down_is_half) : 0.0f;
        (by_channel ? left : right)[i % kDepth][up_at] = up;
        (by_channel ? right : left)[i / kTile][down_at] = down;
      }
      block_sync();
#pragma unroll
      for (int k = 0; k < kDepth; k++)
#pragma unroll
        for (int i = 0; i < kEdge; i++)
#pragma unroll
          for (int j = 0; j < kEdge; j++) sums[i][j] = fma(left[k][row + i], right[k][column + j], sums[i][j]);
    }
  }
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < kEdge; i++)
#pragma unroll
    for (int j = 0; j < kEdge; j++) {
      if (first_row + row + i >= rows || first_column + column + j >= columns) continue;
      const int64_t at = (first_row + row + i) * row_stride + first_column + column + j;
      const float value = sums[i][j] + number(part.base, at, part.is_half), size = fabsf(value);
      largest = fmaxf(largest, size <= 3.4028234e38f ? size : 1.0f / 0.0f);
      if (writes) write_number(part.out, at, value, part.is_half);
    }
  largest = warp_max(largest);
  if (thread % 32 == 0) raise_to(magnitudes + part.weight, largest);
}

}  // namespace sdonnx

// Compute all parts. All pointers are those of the device.
//
// parts: sorted by first_tile; each has ceil(channels / 64) * ceil(inputs / 64) tiles
// magnitudes: one float32 for each weight, set to zero before
// writes: whether to write `out`; otherwise only magnitudes
// Returns null, or the reason for a failure, which is valid until the thread's next call.
SDONNX_EXPORT const char* sdonnx_add_low_rank(const void* parts, int32_t count, int32_t tiles, const void* terms,
                                              void* magnitudes, int32_t writes, void* stream) {
  using namespace sdonnx;
  static thread_local std::string reason;
  try {
    if (count > 0 && tiles > 0)
      launch(low_rank_kernel, dim3(unsigned(tiles)), kLowRankThreads, 2 * kDepth * kPadded * sizeof(float), stream, 1,
             static_cast<const LowRankPart*>(parts), int(count), static_cast<const LowRankTerm*>(terms),
             static_cast<float*>(magnitudes), writes != 0);
    return nullptr;
  } catch (const Failure& failure) {
    reason = failure.text;
    return reason.c_str();
  }
}

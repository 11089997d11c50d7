// Attention to few keys, such as a caption's, on mma.sync, for compute capability 8.0 and newer.
//
// A block loads all keys and values of a head once. Its warps then work without each other: a warp computes every so many
// tiles of 16 queries, and loads the next tile while it computes one. The grid has as many blocks as run at once, so that
// no multiprocessor waits for a last round of blocks.
#pragma once
#include "attention_portable.cuh"

namespace sdonnx {
namespace portable {

// At most KEYS keys.
template <int HEAD, int KEYS>
struct ShortShape : Columns<HEAD> {
  using Columns<HEAD>::kStride;
  static constexpr int kWarps = 4, kThreads = 32 * kWarps, kTile = 16 * kStride;
  static constexpr size_t kShared = sizeof(half) * (2 * kWarps * kTile + 2 * KEYS * kStride);
  // Blocks of a multiprocessor, which bound the registers: a thread holds KEYS / 2 scores, then HEAD / 2 sums.
  static constexpr int kBlocks = HEAD > 128 ? 2 : KEYS > 80 || HEAD > 72 ? 4 : 5;
};

template <int HEAD, int KEYS>
__global__ void __launch_bounds__(ShortShape<HEAD, KEYS>::kThreads, ShortShape<HEAD, KEYS>::kBlocks)
    attention_short_kernel(const AttentionArgs a) {
  prior_kernels_wait();
  using S = ShortShape<HEAD, KEYS>;
  half* k_tile = reinterpret_cast<half*>(shared_memory());
  half* v_tile = k_tile + KEYS * S::kStride;
  const int warp = threadIdx.x / 32;
  half* q_tiles = v_tile + KEYS * S::kStride + 2 * S::kTile * warp;
  const int head = blockIdx.y % a.heads, image = blockIdx.y / a.heads, query_image = image % a.query_images;
  const int stride = 16 * S::kWarps * gridDim.x;
  int query = 16 * (S::kWarps * blockIdx.x + warp);
  const auto copy_queries = [&](half* to, int first) {
    copy_rows<S, HEAD>(a, to, a.q, query_image, a.queries, head, first, 16, threadIdx.x % 32, 32);
    copies_commit();
  };
  copy_rows<S, HEAD>(a, k_tile, a.k, image, a.keys, head, 0, KEYS, threadIdx.x, S::kThreads);
  copy_queries(q_tiles, query);
  copy_rows<S, HEAD>(a, v_tile, a.v, image, a.keys, head, 0, KEYS, threadIdx.x, S::kThreads);
  copies_commit();
  const int keys = count_keys(a, image);
  copies_wait<1>();
  block_sync();
  for (int i = 0; query < a.queries || i == 0; i++, query += stride) {
    half* q_rows = q_tiles + i % 2 * S::kTile;
    if (i > 0) {
      copies_wait<0>();
      warp_sync();  // the queries are there, and all lanes have stored the tile before the last
    }
    float scores[KEYS / 8][4], out[S::kColumns][4] = {};
    multiply_keys<S, KEYS>(scores, q_rows, k_tile);
    if (i == 0) {
      copies_wait<0>();
      block_sync();  // all values are there
    }
    if (query + stride < a.queries) copy_queries(q_tiles + (i + 1) % 2 * S::kTile, query + stride);
    mask_scores(scores, 0, keys);
    Softmax softmax;
    softmax.update(scores, a.scale);
    multiply_values<S, KEYS>(out, scores, v_tile);
    put_rows<S>(q_rows, out, softmax);
    warp_sync();
    store_rows<S, HEAD>(a, q_rows, image, head, query);
  }
}

template <int HEAD, int KEYS>
void launch_short(const AttentionArgs& a, const DeviceLimits& device, void* stream) {
  using S = ShortShape<HEAD, KEYS>;
  const unsigned heads = unsigned(a.heads * a.batch), rounds = ceil_div(a.queries, 16 * S::kWarps);
  const unsigned at_once = unsigned(device.multiprocessors) * S::kBlocks / heads;
  launch(attention_short_kernel<HEAD, KEYS>, dim3(std::max(1u, std::min(rounds, at_once)), heads), S::kThreads, S::kShared,
         stream, 1, a);
}

}  // namespace portable
}  // namespace sdonnx

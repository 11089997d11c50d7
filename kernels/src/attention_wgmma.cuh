// Attention of head size 72 on wgmma and TMA, for compute capability 9.0.
//
// A block computes 128 queries of one head. One warp loads; two warpgroups multiply, 64 queries each. Keys and values come
// in blocks of 128 tokens, two blocks of each in shared memory. Columns 0 to 63 of queries and keys lie in wide tiles, and
// columns 64 to 79 in narrow tiles, whose columns from 72 on are outside of the tensor and so zero: the scores take five
// products of 16 columns. Values lie in five narrow tiles, which one product of 72 columns reads.
//
// The products with the values of a block are issued together with the scores of the next block, whose softmax runs
// beside them. The warpgroups take turns in issuing, so that the softmax of one runs beside the products of the other.
// Measured on an H200 as a prototype (docs/explanation/kernels.md): batch 2, 16 heads, 4096 x 4096 tokens take 366 us,
// and cuDNN's kernel, which pads 72 to 128, takes 399 us.
#pragma once
#include "attention_args.h"
#include "wgmma.h"

namespace sdonnx {
namespace sm90 {

constexpr int kHeadSize = 72;
constexpr int kWarpgroups = 2, kBlockQueries = 64 * kWarpgroups, kBlockKeys = 128, kStages = 2;
constexpr int kWideRow = 128, kNarrowRow = 32;          // bytes: 64 and 16 columns
constexpr int kValueTiles = (kHeadSize + 15) / 16;      // the last is half empty
constexpr int kWideQueries = kBlockQueries * kWideRow, kNarrowQueries = kBlockQueries * kNarrowRow;
constexpr int kWideKeys = kBlockKeys * kWideRow, kNarrowKeys = kBlockKeys * kNarrowRow;
constexpr int kKeyBytes = kWideKeys + kNarrowKeys, kValueBytes = kValueTiles * kNarrowKeys;
constexpr int kStageBytes = kKeyBytes + kValueBytes;
constexpr size_t kAttentionShared =
    kTileAlignment + kWideQueries + kNarrowQueries + size_t(kStages) * kStageBytes;
constexpr unsigned kAttentionThreads = 128 * kWarpgroups + 32;
static_assert(kHeadSize == 72 && kKeyBytes % kTileAlignment == 0 && kStageBytes % kTileAlignment == 0 &&
                  kNarrowQueries % kTileAlignment == 0,
              "tiles begin at multiples of the swizzle");

// Maps of wide and narrow tiles.
struct AttentionMaps {
  CUtensorMap wide_q, narrow_q, wide_k, narrow_k, v;
};

#ifdef SDONNX_HAS_WGMMA

struct AttentionBarriers {
  uint64_t q_full, k_full[kStages], v_full[kStages], k_empty[kStages], v_empty[kStages];
};

// What the loading warp does, in one thread.
__device__ __forceinline__ void load_tiles(const AttentionMaps& maps, AttentionBarriers& barriers, unsigned char* q_tile,
                                           unsigned char* stages, int head, int batch, int query_image,
                                           int first_query, int blocks) {
  barrier_expect(&barriers.q_full, kWideQueries + kNarrowQueries);
  load_box(q_tile, &maps.wide_q, &barriers.q_full, 0, head, first_query, query_image);
  load_box(q_tile + kWideQueries, &maps.narrow_q, &barriers.q_full, 64, head, first_query, query_image);
  for (int i = 0; i < blocks; i++) {
    const int stage = i % kStages, key = i * kBlockKeys, phase = (i / kStages - 1) & 1;
    unsigned char *k_tile = stages + stage * kStageBytes, *v_tiles = k_tile + kKeyBytes;
    if (i >= kStages) barrier_wait(&barriers.k_empty[stage], phase);
    barrier_expect(&barriers.k_full[stage], kKeyBytes);
    load_box(k_tile, &maps.wide_k, &barriers.k_full[stage], 0, head, key, batch);
    load_box(k_tile + kWideKeys, &maps.narrow_k, &barriers.k_full[stage], 64, head, key, batch);
    if (i >= kStages) barrier_wait(&barriers.v_empty[stage], phase);
    barrier_expect(&barriers.v_full[stage], kValueBytes);
    for (int tile = 0; tile < kValueTiles; tile++)
      load_box(v_tiles + tile * kNarrowKeys, &maps.v, &barriers.v_full[stage], 16 * tile, head, key, batch);
  }
}

// Barriers 2 and 3 of the block: the turns of the warpgroups. Barrier 0 is __syncthreads.
__device__ __forceinline__ void await_turn(int warpgroup) {
  asm volatile("bar.sync %0, %1;" ::"r"(2 + warpgroup), "n"(128 * kWarpgroups) : "memory");
}
__device__ __forceinline__ void give_turn(int warpgroup) {
  asm volatile("bar.arrive %0, %1;" ::"r"(2 + warpgroup), "n"(128 * kWarpgroups) : "memory");
}

#endif

__global__ void __launch_bounds__(kAttentionThreads, 1)
    attention_wgmma_kernel(const __grid_constant__ AttentionMaps maps, const AttentionArgs a) {
#ifdef SDONNX_HAS_WGMMA
  prior_kernels_wait();
  unsigned char* tiles = reinterpret_cast<unsigned char*>(
      (reinterpret_cast<uintptr_t>(shared_memory()) + kTileAlignment - 1) & ~uintptr_t(kTileAlignment - 1));
  unsigned char *q_tile = tiles, *stages = tiles + kWideQueries + kNarrowQueries;
  __shared__ AttentionBarriers barriers;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int head = blockIdx.y % a.heads, batch = blockIdx.y / a.heads, first_query = blockIdx.x * kBlockQueries;
  if (threadIdx.x == 0) {
    barrier_init(&barriers.q_full, 1);
    for (int i = 0; i < kStages; i++) {
      barrier_init(&barriers.k_full[i], 1);
      barrier_init(&barriers.v_full[i], 1);
      barrier_init(&barriers.k_empty[i], kWarpgroups);
      barrier_init(&barriers.v_empty[i], kWarpgroups);
    }
    barrier_init_fence();
  }
  block_sync();
  const int blocks = (a.keys + kBlockKeys - 1) / kBlockKeys;
  if (warp == 4 * kWarpgroups) {
    if (lane == 0)
      load_tiles(maps, barriers, q_tile, stages, head, batch, batch % a.query_images, first_query, blocks);
    return;
  }
  const int warpgroup = warp / 4;
  const bool signals = threadIdx.x % 128 == 0;
  // A thread holds the columns 8 j + 2 (lane % 4) + c of two rows r: [4 j + 2 r + c].
  float out[kHeadSize / 2] = {}, scores[kBlockKeys / 2];
  float top[2] = {kMasked, kMasked}, sum[2] = {}, shrink[2];
  uint32_t weights[kBlockKeys / 16][4];  // softmax of a block in fp16, as the first factor of 16 keys each
  const uint64_t wide_q = wide_tile(q_tile + warpgroup * 64 * kWideRow);
  const uint64_t narrow_q = narrow_tile(q_tile + kWideQueries + warpgroup * 64 * kNarrowRow);
  barrier_wait(&barriers.q_full, 0);

  const auto issue_scores = [&](int block) {
    const unsigned char* k_tile = stages + block % kStages * kStageBytes;
    barrier_wait(&barriers.k_full[block % kStages], (block / kStages) & 1);
    registers_fence(scores);
    products_begin();
    const uint64_t wide_k = wide_tile(k_tile);
#pragma unroll
    for (int step = 0; step < 4; step++) multiply(scores, wide_q + 2 * step, wide_k + 2 * step, step);
    multiply(scores, narrow_q, narrow_tile(k_tile + kWideKeys), 1);
    products_end();
  };
  const auto issue_values = [&](int block) {
    const unsigned char* v_tiles = stages + block % kStages * kStageBytes + kKeyBytes;
    barrier_wait(&barriers.v_full[block % kStages], (block / kStages) & 1);
    products_begin();
    const uint64_t values = narrow_tiles(v_tiles, kNarrowKeys);
#pragma unroll
    for (int step = 0; step < kBlockKeys / 16; step++)
      multiply_add(out, weights[step], values + step * (16 * kNarrowRow / 16));
    products_end();
  };
  // Turn scores into exp2(scale * (score - top)), and set what earlier sums shrink by.
  const auto softmax = [&](int block) {
    if (block == blocks - 1 && a.keys % kBlockKeys) {
#pragma unroll
      for (int j = 0; j < kBlockKeys / 2; j++)
        if (block * kBlockKeys + 8 * (j / 4) + 2 * (lane % 4) + j % 2 >= a.keys) scores[j] = kMasked;
    }
    float high[2][2] = {{top[0], top[0]}, {top[1], top[1]}}, shift[2];
#pragma unroll
    for (int j = 0; j < kBlockKeys / 2; j++) high[j / 2 % 2][j % 2] = fmaxf(high[j / 2 % 2][j % 2], scores[j]);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float higher = quad_max(fmaxf(high[r][0], high[r][1]));
      shrink[r] = fast_exp2((top[r] - higher) * a.scale);
      top[r] = higher;
      shift[r] = higher * a.scale;
      sum[r] *= shrink[r];
    }
#pragma unroll
    for (int j = 0; j < kBlockKeys / 2; j += 2) {
      const int r = j / 2 % 2;
      scores[j] = fast_exp2(fmaf(scores[j], a.scale, -shift[r]));
      scores[j + 1] = fast_exp2(fmaf(scores[j + 1], a.scale, -shift[r]));
      sum[r] += scores[j] + scores[j + 1];
    }
  };
  // Only after the products that read the weights: the compiler serializes all products otherwise (ptxas C7513).
  const auto round_weights = [&] {
#pragma unroll
    for (int j = 0; j < kBlockKeys / 2; j += 2)
      weights[j / 8][j / 4 % 2 * 2 + j / 2 % 2] = pack_bits(scores[j], scores[j + 1]);
  };

  issue_scores(0);
  products_wait<0>();
  registers_fence(scores);
  if (signals) barrier_arrive(&barriers.k_empty[0]);
  softmax(0);
  round_weights();
  if (warpgroup == 1) give_turn(0);
  for (int block = 0; block + 1 < blocks; block++) {
    await_turn(warpgroup);
    issue_scores(block + 1);
    issue_values(block);
    give_turn(1 - warpgroup);
    products_wait<1>();
    registers_fence(scores);
    if (signals) barrier_arrive(&barriers.k_empty[(block + 1) % kStages]);
    softmax(block + 1);
    products_wait<0>();
    registers_fence(out);
    if (signals) barrier_arrive(&barriers.v_empty[block % kStages]);
    round_weights();
#pragma unroll
    for (int j = 0; j < kHeadSize / 2; j++) out[j] *= shrink[j / 2 % 2];
    registers_fence(out);
  }
  if (warpgroup == 0) await_turn(0);  // takes the last turn that was given, so that the barrier ends as it began
  issue_values(blocks - 1);
  products_wait<0>();
  registers_fence(out);
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const float inverse = 1.0f / quad_sum(sum[r]);
    const int query = first_query + 16 * warp + lane / 4 + 8 * r;
    if (query < a.queries) {
      half* to = a.y + row_offset<kHeadSize>(a, batch, a.queries, query, head) + 2 * (lane % 4);
#pragma unroll
      for (int j = 0; j < kHeadSize / 8; j++)
        *reinterpret_cast<half2*>(to + 8 * j) =
            __floats2half2_rn(out[4 * j + 2 * r] * inverse, out[4 * j + 2 * r + 1] * inverse);
    }
  }
#else
  __trap();  // has_wgmma is false for libraries without this code
#endif
}

// Return whether the kernel runs here and is worth it: a block computes at least one full tile of queries and keys.
inline bool accepts(const AttentionArgs& a, const DeviceLimits& device) {
  return has_wgmma(device) && a.head_size == kHeadSize && !a.counts && a.aligned && a.queries >= kBlockQueries &&
         a.keys >= kBlockKeys && a.stride == a.heads * a.head_size;
}

// The maps hold the addresses of this call; a captured graph keeps a copy of them, as of all arguments.
inline void launch_attention(const AttentionArgs& a, void* stream) {
  const auto map = [&a](const half* data, int images, int length, int tokens, int columns) {
    return tensor_map(data, images, length, a.heads, kHeadSize, tokens, columns);
  };
  AttentionMaps maps;
  maps.wide_q = map(a.q, a.query_images, a.queries, kBlockQueries, 64);
  maps.narrow_q = map(a.q, a.query_images, a.queries, kBlockQueries, 16);
  maps.wide_k = map(a.k, a.batch, a.keys, kBlockKeys, 64);
  maps.narrow_k = map(a.k, a.batch, a.keys, kBlockKeys, 16);
  maps.v = map(a.v, a.batch, a.keys, kBlockKeys, 16);
  launch(attention_wgmma_kernel, dim3(ceil_div(a.queries, kBlockQueries), unsigned(a.heads * a.batch)),
         kAttentionThreads, kAttentionShared, stream, 1, maps, a);
}

}  // namespace sm90
}  // namespace sdonnx

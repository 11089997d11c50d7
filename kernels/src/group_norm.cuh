// GroupNorm(x (N,H,W,C), gamma (C,), beta (C,), skip?, bias (C,)?, index (1,)?) -> (y, s?), channels last:
// s = x + skip + bias, y = GroupNorm(s), then SiLU if `activation`. x, skip, bias, y and s are fp16, gamma and beta float32.
// skip is (N,H,W,C), or one row per image: (N,1,1,C) or (N,C). With an index it is a table (rows, width), of which the C
// numbers from `offset` on of that row are added to every image.
//
// Two forms, which group_norm_plan chooses from:
// - one launch: a cluster of blocks holds some channels (a slab) of one image in registers and shared memory, so that x is
//   read once
// - two launches: sums of chunks of rows, then the norm, which reads x again. For images too large for a cluster, and for
//   GPUs without clusters
#pragma once
#include "group_norm_kernels.cuh"

namespace sdonnx {

// How a group norm is launched.
struct GroupNormPlan {
  int slab = 0, cluster = 1;              // channels and blocks of a cluster; slab 0: two launches
  int threads = 512, rows = 4;            // of a block, at most; rows of a thread in registers: 4 or 8
  int sums_blocks = 2, scale_blocks = 4;  // of two launches: blocks on a multiprocessor
};

// What the choice of a plan rests on. The time of a launch is taken as proportional to the bytes that the fullest
// multiprocessor reads; other costs are expressed in such bytes. The constants fit the times of 4,971 launches on an H200: the
// plan that they choose takes 3 % more time than the best one for a size, in the mean of 120 pairs of a size and a form
// (docs/results/group-norm-h200.json). Without the waves of clusters it would be 7 %: 15 clusters of 8 blocks fit on an H200, not 16.
struct GroupNormTuning {
  double batch_cost = 1024;         // the rows that a thread loads at once: a wait for memory
  double warp_cost = 16;            // of a multiprocessor
  double barrier_cost = 10 * 1024;  // of a cluster
  double wide_barrier_cost = 6144;  // of a cluster of 8 blocks, in addition
  double two_launches = 0.8;        // the time of two launches for the bytes of all images
  double launch_cost = 80 * 1024;   // of the second launch, with the sums between both
  double imbalance = 0.5;           // the share of the time for which the fullest multiprocessor counts, not the mean
  double clustered = 10.0 / 11;     // the share of multiprocessors on which clusters of 4 and 8 fit: 120 of 132
  int max_slab = 320, max_cluster = 8;  // clusters of 16 are slow to place
  // Two launches:
  int launch_threads = 512, launch_rows = 4;
  int sums_blocks = 2, scale_blocks = 2;  // on a multiprocessor
};

constexpr int kMaxChunks = 512;  // of an image, whose sums a warp adds in the second of two launches

inline int greatest_divisor(int a, int b) { return b ? greatest_divisor(b, a % b) : a; }

// Threads of a block for `vectors` columns and `rows` rows.
struct BlockShape {
  int rows_at_once, batches;  // batches of `in_registers` rows of a thread
  unsigned threads;           // whole warps
};
inline BlockShape block_shape(int vectors, int64_t rows, int most_threads, int in_registers) {
  int64_t at_once = std::max<int64_t>(1, std::min<int64_t>(most_threads / vectors, rows));
  const int64_t of_thread = ceil_div(rows, at_once);
  at_once = ceil_div(rows, of_thread);  // as few threads as that many rows need
  return {int(at_once), int(ceil_div(of_thread, in_registers)), std::max(2u, ceil_div(vectors * at_once, 32)) * 32};
}

// The shared memory of a block of the one launch.
inline size_t cluster_bytes(const GroupNormPlan& plan, const BlockShape& shape, int group_size) {
  return size_t(shape.batches - 1) * plan.rows * shape.threads * sizeof(Half8) + sizeof(float2) * 2 * shape.threads +
         sizeof(float2) * (plan.cluster + 1) * size_t(plan.slab / group_size);
}

inline BlockShape shape_of(const GroupNormPlan& plan, int positions) {
  return block_shape(plan.slab / 8, ceil_div(positions, plan.cluster), plan.threads, plan.rows);
}

inline bool fits(const GroupNormPlan& plan, int positions, int group_size, const DeviceLimits& device) {
  return plan.slab / 8 <= plan.threads &&
         cluster_bytes(plan, shape_of(plan, positions), group_size) <= device.shared_bytes;
}

// The cost of one launch, in bytes of the fullest multiprocessor.
inline double cluster_cost(const GroupNormPlan& plan, int images, int positions, int channels, int group_size,
                           const DeviceLimits& device, const GroupNormTuning& tuning) {
  const BlockShape shape = shape_of(plan, positions);
  // Blocks on a multiprocessor at the same time, by registers, shared memory and threads.
  const size_t bytes = cluster_bytes(plan, shape, group_size) + 1024;
  const int64_t by_registers = 65536 / ((plan.rows > 4 ? 128 : 64) * shape.threads);
  const int64_t by_memory = std::max<int64_t>(1, device.shared_bytes / bytes);
  const int64_t resident = std::max<int64_t>(1, std::min({by_registers, by_memory, int64_t(2048 / shape.threads)}));
  const int usable = std::max(1, int(device.multiprocessors * (plan.cluster > 2 ? tuning.clustered : 1)));
  const int64_t blocks = int64_t(channels / plan.slab) * images * plan.cluster;
  const double waves = ceil_div(blocks, usable * resident), exact = double(blocks) / usable;
  const double load = (1 - tuning.imbalance) * std::max(1.0, exact) + tuning.imbalance * ceil_div(blocks, usable);
  // Memory is read in sectors of 32 bytes, 16 channels.
  const double read = double(ceil_div(positions, plan.cluster)) * ceil_div(plan.slab, 16) * 32;
  const double each = shape.batches * tuning.batch_cost +
                      tuning.warp_cost * (shape.threads / 32) * std::min(double(resident), load) +
                      (plan.cluster > 1 ? tuning.barrier_cost : 0) + (plan.cluster > 4 ? tuning.wide_barrier_cost : 0);
  return load * read + waves * each;
}

inline GroupNormPlan group_norm_plan(int images, int positions, int channels, int group_size, const DeviceLimits& device,
                                     const GroupNormTuning& tuning = {}) {
  GroupNormPlan best;
  best.threads = std::max(tuning.launch_threads, channels / 8);
  best.rows = tuning.launch_rows;
  best.sums_blocks = tuning.sums_blocks;
  best.scale_blocks = tuning.scale_blocks;
  const double whole = double(images) * positions * channels * sizeof(half) / device.multiprocessors;
  double best_cost = tuning.two_launches * whole + tuning.launch_cost;
  // Slabs of whole groups and whole vectors.
  const int unit = group_size * 8 / greatest_divisor(group_size, 8);
  const int most = device.major >= 9 ? tuning.max_cluster : 1;
  GroupNormPlan plan;
  for (plan.slab = unit; plan.slab <= std::min(channels, tuning.max_slab); plan.slab += unit) {
    if (channels % plan.slab) continue;
    for (plan.cluster = 1; plan.cluster == 1 || (plan.cluster <= most && 8 * plan.cluster <= positions); plan.cluster *= 2)
      for (plan.rows = 4; plan.rows <= 8; plan.rows += 4)
        for (plan.threads = 128; plan.threads <= kGroupNormThreads; plan.threads *= 2) {
          if (!fits(plan, positions, group_size, device)) continue;
          const double cost = cluster_cost(plan, images, positions, channels, group_size, device, tuning);
          if (cost < best_cost) {
            best = plan;
            best_cost = cost;
          }
        }
  }
  return best;
}

// The chunks of an image in the first of two launches; 0 for one launch. Two launches need (images, groups, chunks) pairs of
// scratch memory.
inline int chunks_of(const GroupNormPlan& plan, int images, int positions, const DeviceLimits& device) {
  if (plan.slab) return 0;
  const int64_t blocks = std::max<int64_t>(1, int64_t(plan.sums_blocks) * device.multiprocessors / images);
  return int(ceil_div(positions, ceil_div(positions, std::min<int64_t>(kMaxChunks, blocks))));
}

// Launch. `a` has everything but what follows from the plan; a.partial has room for a.chunks = chunks_of(...) pairs.
inline void launch_group_norm(GroupNormArgs a, const GroupNormPlan& plan, int images, const DeviceLimits& device,
                              void* stream) {
  const bool many = plan.rows > 4, adds = a.skip || a.row || a.bias || a.sum;
  if (plan.slab) {
    a.slab = plan.slab;
    a.rows = int(ceil_div(a.positions, plan.cluster));
    const BlockShape shape = block_shape(plan.slab / 8, a.rows, plan.threads, plan.rows);
    a.rows_at_once = shape.rows_at_once;
    a.batches = shape.batches;
    launch(many   ? adds ? group_norm_kernel<8, true> : group_norm_kernel<8, false>
           : adds ? group_norm_kernel<4, true>
                  : group_norm_kernel<4, false>,
           dim3(a.channels / plan.slab * plan.cluster, unsigned(images)), shape.threads,
           cluster_bytes(plan, shape, a.group_size), stream, unsigned(plan.cluster), a);
    return;
  }
  a.rows = int(ceil_div(a.positions, a.chunks));
  BlockShape shape = block_shape(a.channels / 8, a.rows, plan.threads, plan.rows);
  a.rows_at_once = shape.rows_at_once;
  if (a.skip && !a.sum) a.sum = a.y;  // between the launches: so the second does not read both terms again
  launch(many   ? adds ? group_norm_sums_kernel<8, true> : group_norm_sums_kernel<8, false>
         : adds ? group_norm_sums_kernel<4, true>
                : group_norm_sums_kernel<4, false>,
         dim3(a.chunks, unsigned(images)), shape.threads,
         sizeof(float2) * 2 * shape.threads, stream, 1, a);
  a.rows = int(ceil_div(a.positions, std::max<int64_t>(1, int64_t(plan.scale_blocks) * device.multiprocessors / images)));
  shape = block_shape(a.channels / 8, a.rows, plan.threads, plan.rows);
  a.rows_at_once = shape.rows_at_once;
  launch(many ? group_norm_scale_kernel<8> : group_norm_scale_kernel<4>,
         dim3(ceil_div(a.positions, a.rows), unsigned(images)), shape.threads, sizeof(float2) * a.groups, stream, 1, a);
}

class GroupNorm : public Kernel {
 public:
  explicit GroupNorm(const Info& info)
      : Kernel(info),
        groups_(int(info.integer("groups", 32))),
        offset_(info.integer("offset", 0)),
        silu_(info.integer("activation", 0) != 0),
        epsilon_(info.real("epsilon", 1e-5f)) {}

  void compute(const Context& context) override {
    const Tensor x = context.input(0), gamma = context.input(1), beta = context.input(2), skip = context.input(3),
                 bias = context.input(4), index = context.input(5);
    require(x.shape.size() == 4, "GroupNorm of " + std::to_string(x.shape.size()) + " dimensions; expected (N,H,W,C)");
    const int64_t images = x.shape[0], positions = x.shape[1] * x.shape[2], channels = x.shape[3];
    const int64_t size = groups_ > 0 && channels % groups_ == 0 ? channels / groups_ : 0;
    require(size >= 4 && size % 2 == 0 && channels % 8 == 0 && channels <= 8 * kGroupNormThreads,
            "GroupNorm of " + std::to_string(channels) + " channels in " + std::to_string(groups_) +
                " groups; expected a multiple of 8, at most 4096, and an even number of at least 4 in a group");
    require(groups_ <= kMaxGroups, "GroupNorm: more than 128 groups");
    require(gamma.size() == channels && beta.size() == channels, "GroupNorm: gamma and beta must have a number per channel");
    require(!bias.present || bias.size() == channels, "GroupNorm: the bias must have a number per channel");
    const bool is_image = !index.present && skip.present && skip.shape == x.shape && positions != 1;
    require(index.present || !skip.present || is_image || (skip.size() == images * channels && skip.last() == channels),
            "GroupNorm: skip must have the shape of x, or a row per image");
    require(!index.present || (index.size() == 1 && skip.shape.size() == 2 && skip.shape[0] > 0 && offset_ >= 0 &&
                               offset_ + channels <= skip.shape[1] && skip.shape[1] <= 1 << 30),
            "GroupNorm: expected one index, and a table of rows that hold a number per channel");
    require(positions <= 1 << 30 && images <= 65535, "GroupNorm: too many positions or images");
    GroupNormArgs a{};
    a.x = x.as<half>();
    a.skip = is_image ? skip.as<half>() : nullptr;
    a.row = is_image ? nullptr : skip.as<half>();
    a.bias = bias.as<half>();
    a.index = index.as<int64_t>();
    a.table_rows = index.present ? skip.shape[0] : 0;
    a.table_width = index.present ? int(skip.shape[1]) : 0;
    a.offset = int(offset_);
    a.gamma = gamma.as<float>();
    a.beta = beta.as<float>();
    a.y = static_cast<half*>(context.output(0, x.shape));
    a.sum = static_cast<half*>(context.output(1, x.shape));
    a.positions = int(positions);
    a.channels = int(channels);
    a.group_size = int(size);
    a.groups = groups_;
    a.epsilon = epsilon_;
    a.inverse_count = 1.0f / (float(positions) * float(size));
    a.silu = silu_;
    a.aligned = is_aligned(a.x) && is_aligned(a.skip) && is_aligned(a.row) && is_aligned(a.bias) && is_aligned(a.y) &&
                is_aligned(a.sum) && is_aligned(a.gamma) && is_aligned(a.beta) && a.table_width % 8 == 0 &&
                (!a.index || a.offset % 8 == 0);
    if (x.size() == 0) return;
    const DeviceLimits device = device_limits();
    const GroupNormPlan plan = group_norm_plan(int(images), a.positions, a.channels, a.group_size, device);
    a.chunks = chunks_of(plan, int(images), a.positions, device);
    const Scratch scratch = context.scratch(sizeof(float2) * images * a.groups * a.chunks);
    a.partial = static_cast<float2*>(scratch.data());
    launch_group_norm(a, plan, int(images), device, context.stream());
  }

 private:
  int groups_;
  int64_t offset_;
  bool silu_;
  float epsilon_;
};

inline Signature group_norm_signature() {
  return {"GroupNorm",
          kProvider,
          {{ort::kFloat16},
           {ort::kFloat},
           {ort::kFloat},
           {ort::kFloat16, ort::kOptional},
           {ort::kFloat16, ort::kOptional},
           {ort::kInt64, ort::kOptional}},
          {{ort::kFloat16}, {ort::kFloat16, ort::kOptional}},
          make_kernel<GroupNorm>};
}

}  // namespace sdonnx

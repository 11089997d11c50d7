// Attention(q (A,S,N*H), k (B,L,N*H), v (B,L,N*H), counts (B,)?) -> softmax(scale q k^T) v (B,S,N*H), of N heads of H
// numbers, fp16 with a softmax and sums in float32; or SelfAttention of q, k and v in one tensor: (3,B,S,N*H), behind one
// another, or (B,S,3*N*H), of each token. Without a scale it is 1 / sqrt(H). `counts` holds how many keys of each image are not
// padding, at least one; a smaller count is taken as one. A divides B: image b has the query b % A.
//
// H is 40, 64, 72, 80 or 160, the heads of Stable Diffusion and PixArt. Four kernels: on wgmma for heads of 72 and at least
// 128 queries and keys on compute capability 9.0, because cuDNN's kernel pads 72 to 128; for few keys, such as a caption's;
// cuDNN's for more keys and queries without counts; and one for everything else, and where cuDNN has none. The maximum and the
// sum of a softmax are kept in registers (Milakov and Gimelshein 2018), so that scores are never stored, and a block of threads
// adds in a fixed order.
#pragma once
#include "attention_short.cuh"
#ifndef SDONNX_EMULATION
#include "attention_cudnn.cuh"
#include "attention_wgmma.cuh"
#endif

namespace sdonnx {
namespace portable {

template <int HEAD>
void launch_attention(const AttentionArgs& a, const DeviceLimits& device, void* stream) {
  constexpr bool kIsWide = HEAD > 128;  // registers hold fewer sums of scores
  if constexpr (HEAD == 72)
    if (a.keys <= 64) return launch_short<HEAD, 64>(a, device, stream);  // PixArt's short captions
  if (a.keys <= 80) return launch_short<HEAD, 80>(a, device, stream);
  if constexpr (!kIsWide)
    if (a.keys <= 128) return launch_short<HEAD, 128>(a, device, stream);
  launch_long<HEAD, kIsWide ? 4 : 8, 64>(a, stream);
}

inline void (*launcher_of(int64_t head_size))(const AttentionArgs&, const DeviceLimits&, void*) {
  switch (head_size) {
    case 40: return launch_attention<40>;
    case 64: return launch_attention<64>;
    case 72: return launch_attention<72>;
    case 80: return launch_attention<80>;
    case 160: return launch_attention<160>;
    default: return nullptr;
  }
}

}  // namespace portable

class Attention : public Kernel {
 public:
  explicit Attention(const Info& info)
      : Kernel(info), heads_(info.integer("num_heads", 0)), scale_(info.real("scale", 0)) {}

  void compute(const Context& context) override {
    Tensor q = context.input(0), k = context.input(1), v = context.input(2);
    const Tensor counts = context.input(3);
    const bool is_packed = q.shape.size() == 3 && !k.present && !v.present;
    if (is_packed)
      unpack(q, k, v);
    else if (q.shape.size() == 4 && !k.present && !v.present)
      take_apart(q, k, v);
    require(q.shape.size() == 3 && k.shape.size() == 3 && v.shape == k.shape,
            "Attention: expected q (B,S,N*H), and k and v of one shape (B,L,N*H), or the three in one: (3,B,S,N*H), (B,S,3*N*H)");
    const int64_t batch = k.shape[0], images = q.shape[0], queries = q.shape[1], keys = k.shape[1], width = q.shape[2];
    const int64_t head_size = heads_ > 0 && width % heads_ == 0 ? width / heads_ : 0;
    const auto launch = portable::launcher_of(head_size);
    require(launch, "Attention of width " + std::to_string(width) + " in " + std::to_string(heads_) +
                        " heads; expected heads of 40, 64, 72, 80 or 160");
    require((images == batch || (images > 0 && batch % images == 0)) && k.shape[2] == width,
            "Attention: k and v must have the width of q, and its batch or a multiple of it");
    require(!counts.present || counts.shape == std::vector<int64_t>{batch},
            "Attention: expected a number of keys for each image");
    require(scale_ >= 0, "Attention: the scale is negative");
    half* y = static_cast<half*>(context.output(0, {batch, queries, width}));
    if (batch == 0 || q.size() == 0) return;
    require(keys > 0, "Attention: there is no key");
    require(batch * heads_ <= 65535 && queries <= 1 << 30 && keys <= 1 << 30, "Attention: too many tokens, heads or images");
    constexpr float kLog2E = 1.4426950408889634f;
    AttentionArgs a{};
    a.q = q.as<half>();
    a.k = k.as<half>();
    a.v = v.as<half>();
    a.y = y;
    a.counts = counts.as<int>();
    a.batch = int(batch);
    a.query_images = int(images);
    a.queries = int(queries);
    a.keys = int(keys);
    a.heads = int(heads_);
    a.head_size = int(head_size);
    a.stride = int(is_packed ? 3 * width : width);
    const float scale = scale_ > 0 ? scale_ : 1 / std::sqrt(float(head_size));
    a.scale = kLog2E * scale;
    a.aligned = is_aligned(a.q) && is_aligned(a.k) && is_aligned(a.v) && is_aligned(a.y);
    const DeviceLimits device = device_limits();
#ifndef SDONNX_EMULATION
    if (sm90::accepts(a, device)) {
      sm90::launch_attention(a, context.stream());
      return;
    }
    if (dnn::Planner::instance().run(context, a, scale)) return;
#endif
    launch(a, device, context.stream());
  }

 private:
  // Set q, k and v to the three parts of the tensor (3,B,S,N*H) that q is.
  static void take_apart(Tensor& q, Tensor& k, Tensor& v) {
    require(q.shape[0] == 3, "Attention: expected q, k and v behind one another (3,B,S,N*H)");
    q.shape.erase(q.shape.begin());
    k = v = q;
    k.data = q.as<half>() + q.size();
    v.data = q.as<half>() + 2 * q.size();
  }

  // Set q, k and v to the three parts of each row of the tensor (B,S,3*N*H) that q is.
  static void unpack(Tensor& q, Tensor& k, Tensor& v) {
    require(q.last() % 3 == 0, "Attention: expected q, k and v of each token behind one another (B,S,3*N*H)");
    q.shape.back() /= 3;
    k = v = q;
    k.data = q.as<half>() + q.last();
    v.data = q.as<half>() + 2 * q.last();
  }

  int64_t heads_;
  float scale_;
};

inline Signature attention_signature() {
  return {"Attention",
          kProvider,
          {{ort::kFloat16}, {ort::kFloat16}, {ort::kFloat16}, {ort::kInt32, ort::kOptional}},
          {{ort::kFloat16}},
          make_kernel<Attention>};
}

inline Signature self_attention_signature() {
  return {"SelfAttention", kProvider, {{ort::kFloat16}}, {{ort::kFloat16}}, make_kernel<Attention>};
}

}  // namespace sdonnx

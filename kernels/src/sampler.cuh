// What a step computes around the denoiser, with the row of the parameter table that sdonnx/samplers/plans.py writes:
// the index of the next row, the timestep, the input scale, weights (R,2) and a matrix (R,R+1+G), float32. R = 5 rows of
// state, the latents first; G predictions of each image.
//
// SamplerInput(state (R,B,C,H,W), parameters (calls,P), step_index (1,)) -> sample, row (1,P)
//   row = parameters[step_index], sample = state[0] * the input scale, fp16, (B,C,H,W) or (B,H,W,C) if `channels_last`.
// SamplerStep(prediction, state, noise (B,C,H,W), row (1,P), known (2,B,C,H,W), mask (R,B,C,H,W)) -> new state, next index
//   new state = where(mask, weights @ known, matrix @ [state, noise, predictions]). The prediction is fp16, (G*B,D,H,W) or
//   (G*B,H,W,D) if `channels_last`, with D >= C; only the first C channels are read.
//
// The new state may overwrite the state: a thread reads one number of each row, then writes the same places. The next index
// may overwrite the index only because SamplerStep reads it from the row, in a later launch than SamplerInput.
#pragma once
#include "device.cuh"

namespace sdonnx {

constexpr int kStateRows = 5, kRowHeader = 3, kRowWeights = 2 * kStateRows;
constexpr int kSamplerThreads = 128;  // small blocks: a batch of one has 16384 numbers, for 132 multiprocessors

struct SamplerInputArgs {
  const float *state, *parameters;
  const int64_t* step_index;
  half* sample;
  float* row;
  int64_t calls;
  int count, channels, pixels, row_size;  // count: numbers of the latents of all images
  bool channels_last;
};

__global__ void __launch_bounds__(kSamplerThreads) sampler_input_kernel(const SamplerInputArgs a) {
  prior_kernels_wait();
  const int64_t index = *a.step_index;
  // An index outside of the table reads its first or last row, not memory of others.
  const float* row = a.parameters + (index < 0 ? 0 : index < a.calls ? index : a.calls - 1) * a.row_size;
  if (blockIdx.x == 0 && a.row)
    for (int j = threadIdx.x; j < a.row_size; j += kSamplerThreads) a.row[j] = row[j];
  const int i = int(blockIdx.x) * kSamplerThreads + int(threadIdx.x);
  if (i >= a.count) return;
  int from = i;
  if (a.channels_last) {
    const int position = i / a.channels, channel = i - position * a.channels;  // a pixel of an image
    const int image = position / a.pixels;
    from = (image * a.channels + channel) * a.pixels + (position - image * a.pixels);
  }
  a.sample[i] = __floats2half2_rn(a.state[from] * row[2], 0.0f).x;
}

struct SamplerStepArgs {
  const half* prediction;
  const float *state, *noise, *row, *known;
  const bool* mask;
  float* new_state;
  int64_t* next_index;
  int count, images, channels, pixels, prediction_channels;
  bool channels_last;
};

// Products are added in the order of the columns, from zero on, with one rounding each.
template <int COPIES>
__global__ void __launch_bounds__(kSamplerThreads) sampler_step_kernel(const SamplerStepArgs a) {
  prior_kernels_wait();
  constexpr int kTerms = kStateRows + 1 + COPIES, kRowSize = kRowHeader + kRowWeights + kStateRows * kTerms;
  float* row = reinterpret_cast<float*>(shared_memory());
  const int i = int(blockIdx.x) * kSamplerThreads + int(threadIdx.x);
  const bool exists = i < a.count;
  const int image = i / (a.channels * a.pixels), rest = i - image * a.channels * a.pixels;
  const int channel = rest / a.pixels, pixel = rest - channel * a.pixels;
  float terms[kTerms] = {}, known[2] = {};
  bool keep[kStateRows] = {};
  if (exists) {
#pragma unroll
    for (int k = 0; k < kStateRows; k++) {
      terms[k] = a.state[size_t(k) * a.count + i];
      keep[k] = a.mask[size_t(k) * a.count + i];
    }
    terms[kStateRows] = a.noise[i];
#pragma unroll
    for (int g = 0; g < COPIES; g++) {
      const size_t copy = size_t(g) * a.images + image;
      const size_t at = a.channels_last ? (copy * a.pixels + pixel) * a.prediction_channels + channel
                                        : (copy * a.prediction_channels + channel) * a.pixels + pixel;
      half2 value{};
      value.x = a.prediction[at];
      terms[kStateRows + 1 + g] = __half22float2(value).x;
    }
    known[0] = a.known[i];
    known[1] = a.known[size_t(a.count) + i];
  }
  for (int j = threadIdx.x; j < kRowSize; j += kSamplerThreads) row[j] = a.row[j];
  block_sync();
  if (i == 0 && a.next_index) *a.next_index = int64_t(row[0]);
  if (!exists) return;
  const float *weights = row + kRowHeader, *matrix = weights + kRowWeights;
#pragma unroll
  for (int r = 0; r < kStateRows; r++) {
    float updated = 0;
#pragma unroll
    for (int k = 0; k < kTerms; k++) updated = fmaf(matrix[r * kTerms + k], terms[k], updated);
    const float kept = fmaf(weights[2 * r + 1], known[1], fmaf(weights[2 * r], known[0], 0.0f));
    a.new_state[size_t(r) * a.count + i] = keep[r] ? kept : updated;
  }
}

// Set the sizes of latents from a state (R,B,C,H,W); its elements are counted in 32 bits.
template <class A>
void set_latents(A& a, const char* name, const Tensor& state) {
  require(state.shape.size() == 5 && state.shape[0] == kStateRows,
          std::string(name) + ": expected a state (" + std::to_string(kStateRows) + ",B,C,H,W)");
  require(state.size() <= int64_t(1) << 30, std::string(name) + ": the state is too large");
  a.channels = int(state.shape[2]);
  a.pixels = int(state.shape[3] * state.shape[4]);
  a.count = int(state.size() / kStateRows);
}

// Axes of images: (N,C,H,W) or (N,H,W,C).
inline std::vector<int64_t> image_shape(int64_t images, int64_t channels, const Tensor& state, bool channels_last) {
  const int64_t height = state.shape[3], width = state.shape[4];
  return channels_last ? std::vector<int64_t>{images, height, width, channels}
                       : std::vector<int64_t>{images, channels, height, width};
}

class SamplerInput : public Kernel {
 public:
  explicit SamplerInput(const Info& info) : Kernel(info), channels_last_(info.integer("channels_last", 0) != 0) {}

  void compute(const Context& context) override {
    const Tensor state = context.input(0), parameters = context.input(1), step_index = context.input(2);
    SamplerInputArgs a{};
    set_latents(a, "SamplerInput", state);
    require(parameters.shape.size() == 2 && parameters.shape[0] > 0 && parameters.shape[1] > kRowHeader,
            "SamplerInput: expected parameters (calls,P)");
    require(step_index.size() == 1, "SamplerInput: expected one index");
    a.state = state.as<float>();
    a.parameters = parameters.as<float>();
    a.step_index = step_index.as<int64_t>();
    a.sample = static_cast<half*>(context.output(0, image_shape(state.shape[1], state.shape[2], state, channels_last_)));
    a.row = static_cast<float*>(context.output(1, {1, parameters.shape[1]}));
    a.calls = parameters.shape[0];
    a.row_size = int(parameters.shape[1]);
    a.channels_last = channels_last_;
    // Also without images: the row is read for the next index.
    launch(sampler_input_kernel, dim3(std::max(1u, ceil_div(a.count, kSamplerThreads))), kSamplerThreads, 0,
           context.stream(), 1, a);
  }

 private:
  bool channels_last_;
};

class SamplerStep : public Kernel {
 public:
  explicit SamplerStep(const Info& info) : Kernel(info), channels_last_(info.integer("channels_last", 0) != 0) {}

  void compute(const Context& context) override {
    const Tensor prediction = context.input(0), state = context.input(1), noise = context.input(2), row = context.input(3),
                 known = context.input(4), mask = context.input(5);
    SamplerStepArgs a{};
    set_latents(a, "SamplerStep", state);
    const int64_t images = state.shape[1];
    require(prediction.shape.size() == 4, "SamplerStep: expected a prediction of four dimensions");
    const int64_t copies = images ? prediction.shape[0] / images : row.size() == row_size(1) ? 1 : 2;
    const int64_t of_prediction = prediction.shape[channels_last_ ? 3 : 1];
    require(prediction.shape == image_shape(images * copies, of_prediction, state, channels_last_) &&
                of_prediction >= a.channels && (copies == 1 || copies == 2),
            "SamplerStep: the prediction must have one or two copies of each image, and the channels of the state");
    require(noise.size() == a.count && known.size() == 2 * int64_t(a.count) && mask.shape == state.shape,
            "SamplerStep: noise, known latents and mask must have the sizes of the state");
    require(row.size() == row_size(copies), "SamplerStep: a row of " + std::to_string(row.size()) + " parameters; expected " +
                                                std::to_string(row_size(copies)));
    a.prediction = prediction.as<half>();
    a.state = state.as<float>();
    a.noise = noise.as<float>();
    a.row = row.as<float>();
    a.known = known.as<float>();
    a.mask = mask.as<bool>();
    a.new_state = static_cast<float*>(context.output(0, state.shape));
    a.next_index = static_cast<int64_t*>(context.output(1, {1}));
    a.images = int(images);
    a.prediction_channels = int(of_prediction);
    a.channels_last = channels_last_;
    // Also without images: the next index is written.
    launch(copies == 2 ? sampler_step_kernel<2> : sampler_step_kernel<1>,
           dim3(std::max(1u, ceil_div(a.count, kSamplerThreads))), kSamplerThreads, sizeof(float) * size_t(row.size()),
           context.stream(), 1, a);
  }

 private:
  static int64_t row_size(int64_t copies) { return kRowHeader + kRowWeights + kStateRows * (kStateRows + 1 + copies); }

  bool channels_last_;
};

inline Signature sampler_input_signature() {
  return {"SamplerInput",
          kProvider,
          {{ort::kFloat}, {ort::kFloat}, {ort::kInt64}},
          {{ort::kFloat16}, {ort::kFloat, ort::kOptional}},
          make_kernel<SamplerInput>};
}

inline Signature sampler_step_signature() {
  return {"SamplerStep",
          kProvider,
          {{ort::kFloat16}, {ort::kFloat}, {ort::kFloat}, {ort::kFloat}, {ort::kFloat}, {ort::kBool}},
          {{ort::kFloat}, {ort::kInt64, ort::kOptional}},
          make_kernel<SamplerStep>};
}

}  // namespace sdonnx

// compressor::BlockSparseAttention as a kernel of ONNX Runtime's CPU provider, in place of the function of that name.
//
// A task is a tile of queries of one head. Scores and outputs are transposed, [key or value dimension, query], so that
// every loop runs along queries: products broadcast single numbers of keys and values, which are read in place, and the
// softmax adds nothing across a vector. Keys are read in chunks with a running maximum and sum (Milakov and Gimelshein
// 2018, algorithm 3): a thread never holds more than the scores of one chunk.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#define ORT_API_MANUAL_INIT
#include "onnxruntime_cxx_api.h"
#undef ORT_API_MANUAL_INIT

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16, kRegisters = 24;
#elif defined(__AVX__)
constexpr int kLanes = 8, kRegisters = 12;
#elif defined(__aarch64__)
constexpr int kLanes = 4, kRegisters = 24;
#else
constexpr int kLanes = 4, kRegisters = 12;
#endif
// kRegisters: vectors of a product's result that stay in registers; the remaining registers hold its operands.
constexpr int kMostVectors = 4;  // vectors of queries in a tile
constexpr int kMostRows = 8;     // rows whose addresses stay in registers
constexpr int kChunk = 64;       // keys per chunk; with a tile of 64 queries 16 KiB of scores, half of a usual L1 cache

typedef float Vector __attribute__((vector_size(kLanes * sizeof(float)), aligned(sizeof(float)), may_alias));
typedef int32_t Whole __attribute__((vector_size(kLanes * sizeof(int32_t))));

constexpr float kNever = -std::numeric_limits<float>::infinity();
// A number below this, added to a score, hides the key.
constexpr float kHidden = std::numeric_limits<float>::lowest() / 8;

// exp(x) of x <= 0, zero below -87: 2^n exp(r) with |r| <= ln(2) / 2, exp(r) by Taylor's terms up to the seventh.
inline Vector exponential(Vector x) {
  const Whole tiny = x < -87.0f;
  x = tiny ? Vector{} : x;
  const Vector shift = Vector{} + 12582912.0f;  // 1.5 * 2^23: a sum with it has no fraction
  const Vector n = (x * 1.44269504f + shift) - shift;
  const Vector r = (x - n * 0.693145752f) - n * 1.42860677e-6f;  // ln(2) in two parts, the first exact times n
  Vector sum = r * (1.0f / 5040) + 1.0f / 720;
  sum = sum * r + 1.0f / 120;
  sum = sum * r + 1.0f / 24;
  sum = sum * r + 1.0f / 6;
  sum = sum * r + 0.5f;
  sum = sum * r + 1.0f;
  sum = sum * r + 1.0f;
  const Whole exponent = (__builtin_convertvector(n, Whole) + 127) << 23;
  Vector power;
  std::memcpy(&power, &exponent, sizeof power);
  return tiny ? Vector{} : sum * power;
}

inline Vector* vectors(float* numbers) { return reinterpret_cast<Vector*>(numbers); }
inline const Vector* vectors(const float* numbers) { return reinterpret_cast<const Vector*>(numbers); }

// result[m][query] = sum over k of factor(m, k) * right[k][query], added to the result if `add`. Factors are
// rows[m][k], or rows[k][m] if kAcross; m counts from `first`.
template <int kVectors, int kRows, bool kAcross>
inline void multiply_rows(
    const float* const* rows, int64_t first, int64_t count, const float* right, float* result, bool add) {
  constexpr int kWidth = kVectors * kLanes;
  Vector sum[kRows][kVectors];
  for (int m = 0; m < kRows; ++m)
    for (int v = 0; v < kVectors; ++v) sum[m][v] = add ? vectors(result + m * kWidth)[v] : Vector{};
  for (int64_t k = 0; k < count; ++k) {
    Vector factor[kVectors];
    for (int v = 0; v < kVectors; ++v) factor[v] = vectors(right + k * kWidth)[v];
    for (int m = 0; m < kRows; ++m) {
      const float one = kAcross ? rows[k][first + m] : rows[first + m][k];
      for (int v = 0; v < kVectors; ++v) sum[m][v] += factor[v] * one;
    }
  }
  for (int m = 0; m < kRows; ++m)
    for (int v = 0; v < kVectors; ++v) vectors(result + m * kWidth)[v] = sum[m][v];
}

// As many rows at a time as registers hold, then half as many, and so on: the sums of one row depend on each other.
template <int kVectors, bool kAcross, int kRows = std::min(kRegisters / kVectors, kMostRows)>
void multiply(
    const float* const* rows, int64_t size, int64_t count, const float* right, float* result, bool add, int64_t m = 0) {
  constexpr int kWidth = kVectors * kLanes;
  for (; m + kRows <= size; m += kRows)
    multiply_rows<kVectors, kRows, kAcross>(rows, m, count, right, result + m * kWidth, add);
  if constexpr (kRows > 1) multiply<kVectors, kAcross, kRows / 2>(rows, size, count, right, result, add, m);
}

// A tensor of four axes; an axis of size one is broadcast.
struct Tensor {
  const float* numbers = nullptr;
  int64_t shape[4] = {}, step[4] = {};

  Tensor() = default;
  Tensor(const Ort::ConstValue& value, const char* name) : numbers(value.GetTensorData<float>()) {
    const auto sizes = value.GetTensorTypeAndShapeInfo().GetShape();
    if (sizes.size() != 4) throw std::invalid_argument(std::string(name) + ": four axes are needed");
    int64_t every = 1;
    for (int axis = 3; axis >= 0; --axis) {
      shape[axis] = sizes[axis];
      step[axis] = sizes[axis] == 1 ? 0 : every;
      every *= sizes[axis];
    }
  }
  explicit operator bool() const { return numbers != nullptr; }
  const float* at(int64_t a, int64_t b, int64_t c) const {
    return numbers + a * step[0] + b * step[1] + c * step[2];
  }
};

struct Call {
  Tensor query, key, value;  // [batch, position, head, dimension]
  Tensor row, full;          // added to the scores, [batch or 1, 1 or head, 1 or query, key]
  const bool* kept;          // [head, query block, key block]
  int64_t query_blocks, key_blocks, block, persistent, missing;
  bool causal;
  float scale;
  float* output;  // [batch, query, head, dimension]
  int64_t tile, tiles;
  std::vector<int64_t> order;  // of the tasks
  std::atomic<bool> failed{false};
};

struct Scratch {
  std::vector<float> query, scores, output;
  std::vector<const float*> keys, values;
  std::vector<int64_t> places;
};

template <int kVectors>
void attend(const Call& call, int64_t batch, int64_t head, int64_t query_block, int64_t start, int64_t count) {
  constexpr int kWidth = kVectors * kLanes;
  thread_local Scratch scratch;
  auto &query = scratch.query, &scores = scratch.scores, &output = scratch.output;
  auto &key_rows = scratch.keys, &value_rows = scratch.values;
  auto& places = scratch.places;
  const int64_t heads = call.query.shape[2], dim = call.query.shape[3], width = call.value.shape[3];
  const int64_t queries = call.query.shape[1], keys = call.key.shape[1], positions = keys - call.persistent;
  float* result = call.output + ((batch * queries + start) * heads + head) * width;

  key_rows.clear(), value_rows.clear(), places.clear();
  const auto take = [&](int64_t from, int64_t to) {
    for (int64_t place = from; place < to; ++place) {
      if (call.row && call.row.at(batch, head, 0)[place] < kHidden) continue;
      key_rows.push_back(call.key.numbers + ((batch * keys + place) * heads + head) * dim);
      value_rows.push_back(call.value.numbers + ((batch * keys + place) * heads + head) * width);
      places.push_back(place);
    }
  };
  const bool* kept = call.kept + (head * call.query_blocks + query_block) * call.key_blocks;
  const int64_t seen = call.causal ? std::min(positions, start + count) : positions;
  for (int64_t column = 0; column < call.key_blocks; ++column) {
    const int64_t from = column * call.block - call.missing;
    if (kept[column]) take(std::max<int64_t>(0, from), std::min(seen, from + call.block));
  }
  take(positions, keys);

  const int64_t total = places.size();
  query.resize(dim * kWidth), scores.resize(kChunk * kWidth), output.resize(width * kWidth);
  Vector top[kVectors], sum[kVectors] = {};
  for (int v = 0; v < kVectors; ++v) top[v] = Vector{} + kNever;
  if (total) {
    const float* from = call.query.numbers + ((batch * queries + start) * heads + head) * dim;
    for (int64_t d = 0; d < dim; ++d)
      for (int64_t i = 0; i < kWidth; ++i)
        query[d * kWidth + i] = i < count ? from[i * heads * dim + d] * call.scale : 0.0f;
  }
  for (int64_t first = 0; first < total; first += kChunk) {
    const int64_t some = std::min<int64_t>(kChunk, total - first);
    multiply<kVectors, false>(key_rows.data() + first, some, dim, query.data(), scores.data(), false);
    const int64_t* place = places.data() + first;
    if (call.row)
      for (int64_t j = 0; j < some; ++j)
        for (int v = 0; v < kVectors; ++v)
          vectors(&scores[j * kWidth])[v] += call.row.at(batch, head, 0)[place[j]];
    if (call.full)
      for (int64_t i = 0; i < count; ++i) {
        const float* added = call.full.at(batch, head, start + i);
        for (int64_t j = 0; j < some; ++j) {
          float& score = scores[j * kWidth + i];
          score = added[place[j]] < kHidden ? kNever : score + added[place[j]];
        }
      }
    if (call.causal)
      for (int64_t j = 0; j < some; ++j)
        for (int64_t i = 0; i < std::min<int64_t>(kWidth, place[j] - start); ++i) scores[j * kWidth + i] = kNever;

    Vector most[kVectors], again[kVectors];
    for (int v = 0; v < kVectors; ++v) most[v] = top[v];
    for (int64_t j = 0; j < some; ++j)
      for (int v = 0; v < kVectors; ++v) {
        const Vector score = vectors(&scores[j * kWidth])[v];
        most[v] = score > most[v] ? score : most[v];
      }
    for (int v = 0; v < kVectors; ++v) {
      const Vector before = top[v];
      top[v] = most[v];
      // Infinity minus infinity is NaN; a query without any key so far takes any finite maximum.
      most[v] = most[v] == kNever ? Vector{} : most[v];
      again[v] = exponential(before - most[v]);
      sum[v] *= again[v];
    }
    for (int64_t j = 0; j < some; ++j)
      for (int v = 0; v < kVectors; ++v) {
        Vector& score = vectors(&scores[j * kWidth])[v];
        score = exponential(score - most[v]);
        sum[v] += score;
      }
    if (first)
      for (int64_t d = 0; d < width; ++d)
        for (int v = 0; v < kVectors; ++v) vectors(&output[d * kWidth])[v] *= again[v];
    multiply<kVectors, true>(value_rows.data() + first, width, some, scores.data(), output.data(), first > 0);
  }
  for (int64_t i = 0; i < count; ++i) {
    const float weight = sum[i / kLanes][i % kLanes];
    for (int64_t d = 0; d < width; ++d)
      result[i * heads * width + d] = weight == 0 ? 0.0f : output[d * kWidth + i] / weight;
  }
}

// One task, called by the threads of the runtime: no exception may leave it.
void run_task(void* data, size_t number) {
  Call& call = *static_cast<Call*>(data);
  const int64_t heads = call.query.shape[2], queries = call.query.shape[1];
  const int64_t rows = (queries + call.block - 1) / call.block;
  int64_t rest = call.order[number];
  const int64_t tile = rest % call.tiles;
  const int64_t row = (rest /= call.tiles) % rows;
  const int64_t head = (rest /= rows) % heads, batch = rest / heads;
  const int64_t start = row * call.block + tile * call.tile;
  const int64_t count = std::min({call.tile, queries - start, (row + 1) * call.block - start});
  if (count <= 0) return;
  try {
    if (count <= kLanes)
      attend<1>(call, batch, head, row, start, count);
    else if (count <= 2 * kLanes)
      attend<2>(call, batch, head, row, start, count);
    else
      attend<kMostVectors>(call, batch, head, row, start, count);
  } catch (const std::bad_alloc&) {
    call.failed = true;
  }
}

class Kernel {
 public:
  explicit Kernel(const OrtKernelInfo* raw) {
    const Ort::ConstKernelInfo info{raw};
    block_ = info.GetAttribute<int64_t>("block");
    causal_ = info.GetAttribute<int64_t>("causal") != 0;
    memory_ = info.GetAttribute<int64_t>("memory");
    persistent_ = info.GetAttribute<int64_t>("persistent");
    scale_ = info.GetAttribute<float>("scale");
    if (block_ < 1 || memory_ < 0 || persistent_ < 0) throw std::invalid_argument("block, memory or persistent is negative");
  }

  OrtStatusPtr ComputeV2(OrtKernelContext* raw) {
    try {
      compute(Ort::KernelContext{raw});
    } catch (const std::exception& error) {
      return Ort::GetApi().CreateStatus(ORT_INVALID_ARGUMENT, (std::string("BlockSparseAttention: ") + error.what()).c_str());
    }
    return nullptr;
  }

 private:
  void compute(Ort::KernelContext context) {
    Call call;
    call.query = Tensor(context.GetInput(0), "query");
    call.key = Tensor(context.GetInput(1), "key");
    call.value = Tensor(context.GetInput(2), "value");
    const auto mask = context.GetInput(3);
    const auto blocks = mask.GetTensorTypeAndShapeInfo().GetShape();
    const auto [batch, queries, heads, dim] = call.query.shape;
    const int64_t keys = call.key.shape[1], positions = keys - persistent_;
    // Query i is at position i and key j at j - remembered; blocks of keys begin `memory` positions before query 0.
    call.missing = memory_ ? memory_ - (positions - queries) : 0;
    if (blocks.size() != 3 || blocks[0] != heads || call.key.shape[2] != heads || call.value.shape[2] != heads ||
        call.key.shape[3] != dim || call.value.shape[1] != keys || call.key.shape[0] != batch ||
        call.value.shape[0] != batch)
      throw std::invalid_argument("the shapes of query, key, value and mask do not match");
    if (positions < 0 || call.missing < 0 || queries > blocks[1] * block_ ||
        positions + call.missing > blocks[2] * block_)
      throw std::invalid_argument("the mask covers fewer positions");
    for (size_t number = 4; number < context.GetInputCount(); ++number) {
      const auto value = context.GetInput(number);
      if (!value) continue;
      const Tensor added(value, "row or full");
      for (int axis = 0; axis < 4; ++axis)
        if (added.shape[axis] != (axis == 0 ? batch : axis == 1 ? heads : axis == 2 ? queries : keys) &&
            (added.shape[axis] != 1 || axis == 3))
          throw std::invalid_argument("the shape of row or full does not match the scores");
      (!call.row && added.step[1] == 0 && added.step[2] == 0 ? call.row : call.full) = added;
    }
    call.kept = mask.GetTensorData<bool>();
    call.query_blocks = blocks[1], call.key_blocks = blocks[2];
    call.block = block_, call.persistent = persistent_, call.causal = causal_, call.scale = scale_;
    const int64_t shape[] = {batch, queries, heads, call.value.shape[3]};
    call.output = context.GetOutput(0, shape, 4).GetTensorMutableData<float>();
    call.tile = std::min<int64_t>(block_, kMostVectors * kLanes);
    call.tiles = (block_ + call.tile - 1) / call.tile;
    order(call, batch, heads, (queries + block_ - 1) / block_);
    context.ParallelFor(run_task, call.order.size(), 0, &call);
    if (call.failed) throw std::runtime_error("out of memory");
  }

  // Head by head, so that the keys and values of a head stay in a cache; among the last tasks the longest go first, so
  // that no thread starts a long one when the others have finished.
  static void order(Call& call, int64_t batch, int64_t heads, int64_t rows) {
    std::vector<int64_t> work(heads * rows);
    for (int64_t head = 0; head < heads; ++head)
      for (int64_t row = 0; row < rows; ++row) {
        const bool* kept = call.kept + (head * call.query_blocks + row) * call.key_blocks;
        work[head * rows + row] = std::count(kept, kept + call.key_blocks, true);
      }
    call.order.resize(batch * heads * rows * call.tiles);
    std::iota(call.order.begin(), call.order.end(), 0);
    const auto blocks = [&](int64_t task) { return work[task / call.tiles % (heads * rows)]; };
    const auto longer = [&](int64_t left, int64_t right) { return blocks(left) > blocks(right); };
    std::stable_sort(call.order.begin() + call.order.size() * 7 / 8, call.order.end(), longer);
  }

  int64_t block_, memory_, persistent_;
  bool causal_;
  float scale_;
};

struct Operator : Ort::CustomOpBase<Operator, Kernel, true> {
  OrtStatusPtr CreateKernelV2(const OrtApi&, const OrtKernelInfo* info, void** kernel) const {
    try {
      *kernel = new Kernel(info);
    } catch (const std::exception& error) {
      return Ort::GetApi().CreateStatus(ORT_INVALID_GRAPH, error.what());
    }
    return nullptr;
  }
  const char* GetName() const { return "BlockSparseAttention"; }
  const char* GetExecutionProviderType() const { return "CPUExecutionProvider"; }
  size_t GetInputTypeCount() const { return 6; }  // query, key, value, block_mask, row and full
  ONNXTensorElementDataType GetInputType(size_t number) const {
    return number == 3 ? ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL : ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
  }
  OrtCustomOpInputOutputCharacteristic GetInputCharacteristic(size_t number) const {
    return number < 4 ? INPUT_OUTPUT_REQUIRED : INPUT_OUTPUT_OPTIONAL;
  }
  size_t GetOutputTypeCount() const { return 1; }
  ONNXTensorElementDataType GetOutputType(size_t) const { return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT; }
};

// An instruction set that this library was compiled for and the processor lacks; null: none.
const char* lacking() {
#if defined(__AVX512VL__) && defined(__AVX512DQ__) && defined(__AVX512BW__)
  if (!__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq") ||
      !__builtin_cpu_supports("avx512bw"))
    return "AVX-512";
#endif
#if defined(__AVX512F__)
  if (!__builtin_cpu_supports("avx512f")) return "AVX-512";
#endif
#if defined(__FMA__)
  if (!__builtin_cpu_supports("fma")) return "FMA";
#endif
#if defined(__AVX2__)
  if (!__builtin_cpu_supports("avx2")) return "AVX2";
#endif
#if defined(__AVX__)
  if (!__builtin_cpu_supports("avx")) return "AVX";
#endif
  return nullptr;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) OrtStatus* RegisterCustomOps(
    OrtSessionOptions* options, const OrtApiBase* base) {
  const OrtApi* api = base->GetApi(ORT_API_VERSION);
  if (api == nullptr) {
    const auto told = "compiled for ONNX Runtime 1." + std::to_string(ORT_API_VERSION) + " or later";
    return base->GetApi(1)->CreateStatus(ORT_FAIL, told.c_str());
  }
  if (const char* name = lacking()) {
    const auto told = std::string("compiled for a processor with ") + name + ", which this one lacks";
    return api->CreateStatus(ORT_FAIL, told.c_str());
  }
  Ort::InitApi(api);
  try {
    static const Operator op;
    static const Ort::CustomOpDomain domain = [] {
      Ort::CustomOpDomain made{"compressor"};
      made.Add(&op);
      return made;
    }();
    Ort::UnownedSessionOptions(options).Add(domain);
  } catch (const std::exception& error) {
    return api->CreateStatus(ORT_FAIL, error.what());
  }
  return nullptr;
}

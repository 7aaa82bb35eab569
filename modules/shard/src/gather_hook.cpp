#include "ebb/shard/gather_hook.h"

#include "finished_work.h"
#include "work_then.h"

#include <torch/torch.h>

#include <utility>

namespace ebb::shard {
namespace {

// Scales first, as many as there are blocks, then the numbers.
struct Int8Parts {
  at::Tensor scales; ///< [blocks], float
  at::Tensor numbers; ///< [blocks, block], int8

  Int8Parts(const at::Tensor& bytes, std::int64_t blocks, std::int64_t block)
      : scales(bytes.narrow(0, 0, 4 * blocks).view(at::kFloat)),
        numbers(bytes.narrow(0, 4 * blocks, blocks * block).view(at::kChar).view({blocks, block})) {}
};

} // namespace

std::unique_ptr<comm::Work> gather_as_is(const ParameterGather& gather) {
  return gather.group.all_gather(gather.output, gather.shard.to(gather.output.scalar_type()), gather.unit);
}

GatherHook gather_packed(GatherCodec codec) {
  TORCH_CHECK_VALUE(
      codec.pack && codec.unpack,
      "[gather_packed] expected a codec with pack and unpack, got one without; set both functions");
  return [codec = std::move(codec)](const ParameterGather& gather) -> std::unique_ptr<comm::Work> {
    if (gather.again || !gather.shard.is_floating_point()) {
      return gather_as_is(gather);
    }
    const auto mine = codec.pack(gather.shard);
    TORCH_CHECK_VALUE(
        mine.defined() && mine.is_contiguous(), "[gather_packed] expected pack() of unit '", gather.unit,
        "' to return a contiguous tensor; return its contiguous()");
    auto all = at::empty({gather.group.size() * mine.numel()}, mine.options());
    auto work = gather.group.all_gather(all, mine.view({-1}), gather.unit);
    return std::make_unique<WorkThen>(
        std::move(work),
        [all = std::move(all), output = gather.output, ranks = gather.group.size(), unpack = codec.unpack] {
          const auto from = all.view({ranks, -1});
          const auto to = output.view({ranks, -1});
          for (int rank = 0; rank < ranks; ++rank) {
            unpack(from[rank], to[rank]);
          }
        });
  };
}

GatherCodec bf16_codec() {
  return {
      [](const at::Tensor& shard) { return shard.to(at::kBFloat16); },
      [](const at::Tensor& packed, const at::Tensor& output) { output.copy_(packed); }};
}

GatherCodec int8_codec(int block) {
  TORCH_CHECK_VALUE(block >= 4 && block % 4 == 0, "[int8_codec] expected a multiple of 4 as block, got ", block);
  const auto blocks_of = [block](std::int64_t numel) { return (numel + block - 1) / block; };
  return {
      [=](const at::Tensor& shard) {
        const auto blocks = blocks_of(shard.numel());
        auto values = at::zeros({blocks * block}, shard.options().dtype(at::kFloat));
        values.narrow(0, 0, shard.numel()).copy_(shard);
        values = values.view({blocks, block});
        auto bytes = at::empty({blocks * (block + 4)}, shard.options().dtype(at::kByte));
        Int8Parts parts(bytes, blocks, block);
        parts.scales.copy_(values.abs().amax(1) / 127);
        parts.numbers.copy_((values / parts.scales.clamp_min(1e-30).unsqueeze(1)).round());
        return bytes;
      },
      [=](const at::Tensor& packed, const at::Tensor& output) {
        const Int8Parts parts(packed, blocks_of(output.numel()), block);
        const auto values = parts.numbers.to(at::kFloat) * parts.scales.unsqueeze(1);
        output.copy_(values.view({-1}).narrow(0, 0, output.numel()));
      }};
}

std::unique_ptr<comm::Work> fake_gather(const ParameterGather& gather) {
  const at::NoGradGuard no_grad;
  gather.output.view({gather.group.size(), -1}).copy_(gather.shard.unsqueeze(0));
  return std::make_unique<FinishedWork>();
}

} // namespace ebb::shard

#include "run_summary.h"

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include <algorithm>

namespace ebb::app {
namespace {

std::string megabytes(std::int64_t bytes) {
  return fmt::format("{:.1f} MB", static_cast<double>(bytes) / 1e6);
}

std::string range(const std::vector<RankReport>& ranks, std::int64_t RankReport::*member) {
  const auto [least, most] = std::minmax_element(
      ranks.begin(), ranks.end(), [member](const auto& a, const auto& b) { return a.*member < b.*member; });
  const auto low = megabytes((*least).*member), high = megabytes((*most).*member);
  return low == high ? low : low + " to " + high;
}

} // namespace

std::string as_json(const RunSummary& summary) {
  nlohmann::ordered_json json{
      {"outcome", summary.outcome},
      {"model", summary.model},
      {"strategy", summary.strategy},
      {"backend", summary.backend},
      {"world_size", summary.ranks.size()},
      {"steps", summary.steps},
      {"planned_steps", summary.planned_steps},
      {"parameters", summary.num_parameters},
  };
  for (const auto& rank : summary.ranks) {
    json["shard_bytes_per_rank"].push_back(rank.parameter_bytes);
    json["peak_memory_bytes_per_rank"].push_back(rank.peak_memory_bytes);
  }
  if (summary.train_loss) {
    json["train_loss"] = *summary.train_loss;
  }
  if (summary.grad_norm) {
    json["grad_norm"] = *summary.grad_norm;
  }
  if (summary.eval_loss) {
    json["eval_loss"] = *summary.eval_loss;
    json["eval_step"] = summary.eval_step;
  }
  json["loss_unit"] = "nats per byte";
  json["tokens"] = summary.tokens;
  json["seconds"] = summary.seconds;
  json["step_seconds"] = summary.step_seconds;
  json["tokens_per_second"] = summary.tokens_per_second();
  json["tflops_per_rank"] = summary.tflops_per_rank;
  if (summary.sample) {
    json["sample"] = *summary.sample;
  }
  if (summary.sample_words) {
    json["sample_words"] = summary.sample_words->words;
    json["sample_words_in_corpus"] = summary.sample_words->known;
    json["sample_known_word_fraction"] = summary.sample_words->fraction();
  }
  return json.dump(2, ' ', /*ensure_ascii=*/true, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

std::string as_text(const RunSummary& summary) {
  std::string text;
  if (summary.sample) {
    text += "\nThe model writes:\n\n" + *summary.sample + "\n";
  }
  text += fmt::format(
      "\n{}: {} of {} steps, {} tokens in {:.1f} s ({:.0f} tokens/s, {:.3f} TFLOPS a rank in steps)\n", summary.outcome,
      summary.steps, summary.planned_steps, summary.tokens, summary.seconds, summary.tokens_per_second(),
      summary.tflops_per_rank);
  if (summary.train_loss) {
    text += fmt::format("  training loss    {:.3f} nats a byte (mean of the last steps)\n", *summary.train_loss);
  }
  if (summary.grad_norm) {
    text += fmt::format("  gradient norm    {:.3g} before clipping (mean of the last steps)\n", *summary.grad_norm);
  }
  if (summary.eval_loss) {
    text +=
        fmt::format("  validation loss  {:.3f} nats a byte (after step {})\n", *summary.eval_loss, summary.eval_step);
  }
  if (summary.sample_words) {
    text += fmt::format(
        "  sampled words    {} of {} with three letters or more occur in the text\n", summary.sample_words->known,
        summary.sample_words->words);
  }
  text += fmt::format(
      "  memory a rank    {} peak, of which {} parameters kept\n", range(summary.ranks, &RankReport::peak_memory_bytes),
      range(summary.ranks, &RankReport::parameter_bytes));
  return text;
}

} // namespace ebb::app

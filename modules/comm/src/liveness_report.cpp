#include "liveness_report.h"

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <charconv>

namespace ebb::comm {
namespace {

constexpr const char* kStoreHost = "liveness/store_host";

} // namespace

std::string LossReport::text() const {
  return std::to_string(rank) + " " + why;
}

LossReport LossReport::parse(const std::string& text) {
  LossReport report;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), report.rank);
  if (error != std::errc()) {
    return {};
  }
  report.why.assign(std::min(end + 1, text.data() + text.size()), text.data() + text.size());
  return report;
}

LossReport report_loss(const c10::intrusive_ptr<c10d::Store>& group, const LossReport& report) {
  const auto text = report.text();
  auto stored = group->compareSet(kLostKey, "", text);
  if (stored == kNobodyLost) {
    stored = group->compareSet(kLostKey, kNobodyLost, text);
  }
  return LossReport::parse(stored);
}

bool loss_reported(const c10::intrusive_ptr<c10d::Store>& group) {
  return group->check({kLostKey}) && group->get_to_str(kLostKey) != kNobodyLost;
}

void set_store_host(const c10::intrusive_ptr<c10d::Store>& group, int rank) {
  group->set(kStoreHost, std::to_string(rank));
}

std::optional<int> store_host(const c10::intrusive_ptr<c10d::Store>& group) {
  if (!group->check({kStoreHost})) {
    return std::nullopt;
  }
  return LossReport::parse(group->get_to_str(kStoreHost)).rank;
}

} // namespace ebb::comm

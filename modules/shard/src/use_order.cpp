#include "use_order.h"

#include <algorithm>

namespace ebb::shard {
namespace {

// A forward that is never followed by a backward (validation without no_grad) must not grow the record for ever.
constexpr std::size_t kMaxVisits = 1 << 16;

} // namespace

void UseOrder::Sequence::restart() {
  if (!current.empty()) {
    last = std::move(current);
  }
  current.clear();
  cursor = -1;
}

void UseOrder::Sequence::visit(int unit) {
  if (current.size() >= kMaxVisits) {
    restart();
  }
  current.push_back(unit);
  const auto found = std::find(last.begin() + std::min<std::int64_t>(cursor + 1, last.size()), last.end(), unit);
  cursor = found == last.end() ? -1 : found - last.begin();
}

void UseOrder::visit(int unit, Pass pass) {
  pass_ = pass;
  switch (pass) {
    case Pass::kForward:
      forward_.visit(unit);
      backward_cursor_ = static_cast<std::int64_t>(forward_.current.size());
      break;
    case Pass::kEvaluation: {
      // Nothing marks the end of a forward without backward: a sequence that is complete and begins anew does.
      auto& e = evaluation_;
      const bool complete = !e.last.empty() && e.cursor == static_cast<std::int64_t>(e.last.size()) - 1;
      const bool repeats = e.last.empty() && e.current.size() > 1 && e.current.front() == unit &&
                           static_cast<int>(e.current.size()) >= num_units_;
      if ((complete && e.last.front() == unit) || repeats) {
        e.restart();
      }
      e.visit(unit);
      break;
    }
    case Pass::kBackward: {
      ++backward_uses_[unit];
      const auto& visits = forward_.current;
      auto i = std::min<std::int64_t>(backward_cursor_, visits.size()) - 1;
      while (i >= 0 && visits[i] != unit) {
        --i;
      }
      if (i >= 0) {
        backward_cursor_ = i;
      }
      break;
    }
  }
}

std::vector<int> UseOrder::upcoming(int count) const {
  std::vector<int> units;
  const auto add = [&](int unit) {
    if (std::find(units.begin(), units.end(), unit) == units.end()) {
      units.push_back(unit);
    }
  };
  if (pass_ == Pass::kBackward) {
    for (auto i = backward_cursor_ - 1; i >= 0 && static_cast<int>(units.size()) < count; --i) {
      if (backward_needs(forward_.current[i], backward_uses_[forward_.current[i]])) {
        add(forward_.current[i]);
      }
    }
    return units;
  }
  const auto& sequence = pass_ == Pass::kForward ? forward_ : evaluation_;
  const auto size = static_cast<std::int64_t>(sequence.last.size());
  if (sequence.cursor < 0) {
    return units;
  }
  for (auto i = sequence.cursor + 1; i < size && static_cast<int>(units.size()) < count; ++i) {
    add(sequence.last[i]);
  }
  if (pass_ == Pass::kEvaluation) {
    for (std::int64_t i = 0; i < sequence.cursor && static_cast<int>(units.size()) < count; ++i) {
      add(sequence.last[i]);
    }
  } else {
    for (auto i = size - 1; i >= 0 && static_cast<int>(units.size()) < count; --i) { // the backward to come
      if (backward_needs(sequence.last[i], 0)) {
        add(sequence.last[i]);
      }
    }
  }
  return units;
}

std::int64_t UseOrder::next_use(int unit) const {
  if (pass_ == Pass::kBackward) {
    for (auto i = backward_cursor_ - 1; i >= 0 && backward_needs(unit, backward_uses_[unit]); --i) {
      if (forward_.current[i] == unit) {
        return backward_cursor_ - i;
      }
    }
    return kNever;
  }
  const auto& sequence = pass_ == Pass::kForward ? forward_ : evaluation_;
  if (sequence.cursor < 0) {
    return kNever;
  }
  const auto size = static_cast<std::int64_t>(sequence.last.size());
  for (auto i = sequence.cursor + 1; i < size; ++i) {
    if (sequence.last[i] == unit) {
      return i - sequence.cursor;
    }
  }
  const auto remaining = size - 1 - sequence.cursor;
  if (pass_ == Pass::kEvaluation) {
    for (std::int64_t i = 0; i <= sequence.cursor; ++i) {
      if (sequence.last[i] == unit) {
        return remaining + 1 + i;
      }
    }
    return kNever;
  }
  for (auto i = size - 1; i >= 0 && backward_needs(unit, 0); --i) {
    if (sequence.last[i] == unit) {
      return remaining + size - i;
    }
  }
  return kNever;
}

void UseOrder::end_step() {
  if (std::any_of(backward_uses_.begin(), backward_uses_.end(), [](int uses) { return uses > 0; })) {
    last_backward_uses_ = backward_uses_;
    knows_backward_ = true;
    std::fill(backward_uses_.begin(), backward_uses_.end(), 0);
  }
  forward_.restart();
  backward_cursor_ = 0;
  pass_ = Pass::kForward;
}

} // namespace ebb::shard

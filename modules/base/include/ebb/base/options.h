#pragma once

#include <c10/util/Exception.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace ebb {

// Note [Options]
// Options are plain aggregates with defaults. Each lists its fields once:
//   template <class Visit> static void fields(Visit&& visit) {
//     visit("lr", &TrainOptions::lr, "Peak learning rate.", above(0));
//   }
// From that list come the checks below, command-line flags, their help, the keys of a configuration file, and the
// record of what a run really used. A member is a bool, std::int64_t, double, std::string, a std::vector<std::string>,
// a std::array of numbers, or a std::optional of one of these.

/// Which values a field may have, and how they are read. For numbers (each one of an array): the range. For strings:
/// the choices, if any.
struct Bounds {
  double min = -std::numeric_limits<double>::infinity();
  double max = std::numeric_limits<double>::infinity();
  bool min_allowed = true;
  bool max_allowed = true;
  std::vector<std::string> choices = {};
  bool is_path = false; ///< In a configuration file a relative path starts at that file's folder.
  bool may_be_empty = true; ///< Of strings.

  /// "at least 1", "in (0, 1]", "one of a, b"; empty when every value may be.
  std::string text() const {
    std::ostringstream out;
    out.precision(15); // 1000000, not 1e+06
    const bool has_min = min != -std::numeric_limits<double>::infinity();
    const bool has_max = max != std::numeric_limits<double>::infinity();
    if (!choices.empty()) {
      out << "one of ";
      for (std::size_t i = 0; i < choices.size(); ++i) {
        out << (i ? ", " : "") << choices[i];
      }
    } else if (has_min && has_max) {
      out << "in " << (min_allowed ? '[' : '(') << min << ", " << max << (max_allowed ? ']' : ')');
    } else if (has_min) {
      out << (min_allowed ? "at least " : "above ") << min;
    } else if (has_max) {
      out << (max_allowed ? "at most " : "below ") << max;
    }
    return out.str();
  }
};

/// No bounds; numbers must be finite all the same.
inline Bounds any_value() {
  return {};
}
/// [min, infinity)
inline Bounds at_least(double min) {
  return {.min = min};
}
/// (min, infinity)
inline Bounds above(double min) {
  return {.min = min, .min_allowed = false};
}
/// [min, max]
inline Bounds between(double min, double max) {
  return {.min = min, .max = max};
}
/// [min, max)
inline Bounds from_up_to(double min, double max) {
  return {.min = min, .max = max, .max_allowed = false};
}
/// The path of a file that is read.
inline Bounds path() {
  return {.is_path = true};
}
/// A string of at least one byte.
inline Bounds not_empty() {
  return {.may_be_empty = false};
}
/// One of these strings.
inline Bounds one_of(std::vector<std::string> choices) {
  return {.choices = std::move(choices)};
}

/// Whether T is a std::optional.
template <class T>
struct IsOptional : std::false_type {};
template <class T>
struct IsOptional<std::optional<T>> : std::true_type {};
/// Whether T is a std::array.
template <class T>
struct IsArray : std::false_type {};
template <class T, std::size_t N>
struct IsArray<std::array<T, N>> : std::true_type {};

/// A value as people write it: `0.1`, `true`, `text`, `a,b`; an absent optional is empty.
template <class T>
std::string option_text(const T& value) {
  std::ostringstream out;
  out.precision(17);
  if constexpr (IsOptional<T>::value) {
    out << (value ? option_text(*value) : "");
  } else if constexpr (std::is_same_v<T, bool>) {
    out << (value ? "true" : "false");
  } else if constexpr (std::is_same_v<T, double>) {
    out.precision(6); // the shortest of two that reads back the same: 0.1, not 0.10000000000000001
    out << value;
    if (std::stod(out.str()) != value) {
      out.str("");
      out.precision(17);
      out << value;
    }
  } else if constexpr (std::is_arithmetic_v<T> || std::is_same_v<T, std::string>) {
    out << value;
  } else {
    std::string separator;
    for (const auto& element : value) {
      out << separator << option_text(element);
      separator = ",";
    }
  }
  return out.str();
}

/// What is wrong with `value`, as "expected at least 1, got 0"; empty when it is within `bounds`.
template <class T>
std::string violation(const T& value, const Bounds& bounds) {
  if constexpr (IsOptional<T>::value) {
    return value ? violation(*value, bounds) : std::string();
  } else if constexpr (IsArray<T>::value) {
    for (const auto& element : value) {
      if (auto text = violation(element, bounds); !text.empty()) {
        return text;
      }
    }
  } else if constexpr (std::is_same_v<T, std::string>) {
    for (const auto& choice : bounds.choices) {
      if (value == choice) {
        return {};
      }
    }
    if (!bounds.choices.empty()) {
      return "expected " + bounds.text() + ", got '" + value + "'";
    }
    if (value.empty() && !bounds.may_be_empty) {
      return "expected at least one byte, got none";
    }
  } else if constexpr (std::is_arithmetic_v<T> && !std::is_same_v<T, bool>) {
    const auto number = static_cast<double>(value);
    if (!std::isfinite(number)) {
      const auto range = bounds.text();
      return "expected a finite number" + (range.empty() ? "" : " " + range) + ", got " + option_text(value);
    }
    const bool high_enough = bounds.min_allowed ? number >= bounds.min : number > bounds.min;
    const bool low_enough = bounds.max_allowed ? number <= bounds.max : number < bounds.max;
    if (!(high_enough && low_enough)) {
      return "expected " + bounds.text() + ", got " + option_text(value);
    }
  }
  return {};
}

/// @throws ValueError "[where] name: expected ..., got ..." for the first field out of its bounds.
template <class Options>
void check_options(const Options& options, std::string_view where) {
  Options::fields([&](std::string_view name, auto member, std::string_view help, const Bounds& bounds) {
    const auto text = violation(options.*member, bounds);
    TORCH_CHECK_VALUE(text.empty(), "[", where, "] ", name, ": ", text, " (", help, ")");
  });
}

/// Every field's name and value in the order of the list: for records and comparison.
template <class Options>
std::vector<std::pair<std::string, std::string>> option_values(const Options& options) {
  std::vector<std::pair<std::string, std::string>> values;
  Options::fields([&](std::string_view name, auto member, std::string_view, const Bounds&) {
    values.emplace_back(name, option_text(options.*member));
  });
  return values;
}

} // namespace ebb

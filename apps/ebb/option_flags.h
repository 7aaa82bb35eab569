#pragma once

#include "ebb/base/options.h"

#include <CLI/CLI.hpp>

#include <algorithm>
#include <charconv>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

namespace ebb::app {

/// "weight_decay" to "--weight-decay".
inline std::string flag_name(std::string_view field) {
  std::string flag = "--" + std::string(field);
  std::replace(flag.begin(), flag.end(), '_', '-');
  return flag;
}

/// A number as a flag gives it. The flag library's own conversion would cut what does not fit to the largest that does.
/// @throws ValueError for text that is no number, or one that T cannot hold; names the flag.
template <class T>
T number_of(const std::string& flag, const std::string& text) {
  constexpr const char* kKind = std::is_same_v<T, double> ? "a number" : "a whole number";
  T value{};
  const char* begin = text.data() + (text.starts_with('+') ? 1 : 0);
  const auto [end, error] = std::from_chars(begin, text.data() + text.size(), value);
  TORCH_CHECK_VALUE(
      error != std::errc::result_out_of_range, flag, ": expected ", kKind, " that fits 64 bits, got ", text);
  TORCH_CHECK_VALUE(
      error == std::errc() && end == text.data() + text.size(), flag, ": expected ", kKind, ", got '", text, "'");
  return value;
}

/// Command-line flags made from the fields of option structs. What was given is kept aside until apply(), so that a
/// configuration file can be read in between: flags win over it.
class OptionFlags {
 public:
  /// A flag for every field of `options`, under `title` in --help. `options` must outlive this.
  template <class Options>
  void add(CLI::App& command, const std::string& title, Options& options) {
    Options::fields([&](std::string_view name, auto member, std::string_view help, const Bounds& bounds) {
      using Member = std::remove_reference_t<decltype(options.*member)>;
      const auto flag = flag_name(name);
      const auto text = describe(help, bounds, option_text(options.*member));
      if constexpr (std::is_same_v<Member, bool>) {
        auto given = std::make_shared<bool>();
        keep(command.add_flag(flag, *given, text), title, given, [&options, member](const bool& value) {
          options.*member = value;
        });
      } else if constexpr (IsArray<Member>::value) {
        using Element = typename Member::value_type;
        auto given = std::make_shared<std::vector<std::string>>();
        constexpr int kCount = std::tuple_size_v<Member>;
        auto* option = command.add_option(flag, *given, text)->expected(kCount)->type_name(kTypeName<Element>);
        option->group(title);
        steps_.push_back([option, flag, bounds, given, &options, member] {
          if (option->count() > 0) {
            Member value{};
            std::transform(given->begin(), given->begin() + kCount, value.begin(), [&](const std::string& element) {
              return number_of<Element>(flag, element);
            });
            check(flag, value, bounds);
            options.*member = value;
          }
        });
      } else {
        using Value = typename ValueOf<Member>::type;
        constexpr bool kNumber = std::is_arithmetic_v<Value>;
        using Given = std::conditional_t<kNumber, std::string, Value>;
        auto given = std::make_shared<Given>();
        auto* option = command.add_option(flag, *given, text);
        if constexpr (kNumber) {
          option->type_name(kTypeName<Value>);
        }
        keep(option, title, given, [&options, member, flag, bounds](const Given& raw) {
          if constexpr (kNumber) {
            const auto value = number_of<Value>(flag, raw);
            check(flag, value, bounds);
            options.*member = value;
          } else {
            check(flag, raw, bounds);
            options.*member = raw;
          }
        });
      }
    });
  }

  /// Writes what was given on the command line into the options.
  /// @throws ValueError for a value out of bounds; names the flag.
  void apply() const {
    for (const auto& step : steps_) {
      step();
    }
  }

 private:
  template <class T>
  static constexpr const char* kTypeName = std::is_same_v<T, double> ? "FLOAT" : "INT"; // in --help

  template <class T>
  struct ValueOf {
    using type = T;
  };
  template <class T>
  struct ValueOf<std::optional<T>> {
    using type = T;
  };

  static std::string describe(std::string_view help, const Bounds& bounds, const std::string& value) {
    std::string text(help);
    const auto range = bounds.text();
    if (!range.empty() || !value.empty()) {
      std::string shown = value == "\n" ? "a newline" : value;
      text +=
          " [" + range + (range.empty() || value.empty() ? "" : "; ") + (value.empty() ? "" : "default " + shown) + "]";
    }
    return text;
  }

  template <class T>
  static void check(const std::string& flag, const T& value, const Bounds& bounds) {
    const auto text = violation(value, bounds);
    TORCH_CHECK_VALUE(text.empty(), flag, ": ", text);
  }

  template <class T, class Assign>
  void keep(CLI::Option* option, const std::string& title, std::shared_ptr<T> given, Assign assign) {
    option->group(title);
    if (option->get_items_expected_max() == 1) {
      option->take_last(); // so that a script's flags can be followed by others
    }
    steps_.push_back([option, given, assign] {
      if (option->count() > 0) {
        assign(*given);
      }
    });
  }

  std::vector<std::function<void()>> steps_;
};

} // namespace ebb::app

#pragma once

#include "ebb/base/options.h"

#include <CLI/CLI.hpp>

#include <algorithm>
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
        keep(command.add_flag(flag, *given, text), title, flag, bounds, given, [&options, member](const bool& value) {
          options.*member = value;
        });
      } else if constexpr (IsOptional<Member>::value) {
        auto given = std::make_shared<typename Member::value_type>();
        keep(
            command.add_option(flag, *given, text), title, flag, bounds, given,
            [&options, member](const typename Member::value_type& value) { options.*member = value; });
      } else if constexpr (IsArray<Member>::value) {
        auto given = std::make_shared<std::vector<typename Member::value_type>>();
        constexpr int kCount = std::tuple_size_v<Member>;
        Member sized{};
        keep(
            command.add_option(flag, *given, text)->expected(kCount), title, flag, bounds, given,
            [&options, member, sized](const std::vector<typename Member::value_type>& value) mutable {
              std::copy_n(value.begin(), kCount, sized.begin());
              options.*member = sized;
            });
      } else {
        auto given = std::make_shared<Member>();
        keep(
            command.add_option(flag, *given, text), title, flag, bounds, given,
            [&options, member](const Member& value) { options.*member = value; });
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

  template <class T, class Assign>
  void keep(
      CLI::Option* option, const std::string& title, const std::string& flag, const Bounds& bounds,
      std::shared_ptr<T> given, Assign assign) {
    option->group(title);
    if (option->get_items_expected_max() == 1) {
      option->take_last(); // so that a script's flags can be followed by others
    }
    steps_.push_back([option, flag, bounds, given, assign]() mutable {
      if (option->count() == 0) {
        return;
      }
      if constexpr (std::is_same_v<T, std::vector<double>>) {
        for (const auto& element : *given) {
          const auto text = violation(element, bounds);
          TORCH_CHECK_VALUE(text.empty(), flag, ": ", text);
        }
      } else {
        const auto text = violation(*given, bounds);
        TORCH_CHECK_VALUE(text.empty(), flag, ": ", text);
      }
      assign(*given);
    });
  }

  std::vector<std::function<void()>> steps_;
};

} // namespace ebb::app

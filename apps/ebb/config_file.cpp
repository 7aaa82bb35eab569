#include "config_file.h"

#include "ebb/base/error.h"

#include <toml++/toml.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <numeric>
#include <sstream>

namespace ebb::app {
namespace {

constexpr std::size_t kLargestFile = 1 << 20;

/// Fewest insertions, deletions and replacements that turn one into the other.
std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), 0);
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const auto replaced = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = row[j];
      row[j] = std::min({replaced, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row.back();
}

struct Place {
  std::string file;
  std::string folder;

  std::string at(const toml::node& node) const {
    return file + ":" + std::to_string(node.source().begin.line);
  }
};

std::string kind_of(const toml::node& node) {
  std::ostringstream out;
  out << node.type();
  return out.str();
}

[[noreturn]] void wrong_type(
    const Place& place, const std::string& name, const toml::node& node, const char* expected) {
  TORCH_CHECK_VALUE(false, place.at(node), ": ", name, ": expected ", expected, ", got a TOML ", kind_of(node));
}

/// One value of type T, or an error that names key and line.
template <class T>
T value_of(const Place& place, const std::string& name, const toml::node& node, const Bounds& bounds) {
  if constexpr (IsOptional<T>::value) {
    return value_of<typename T::value_type>(place, name, node, bounds);
  } else if constexpr (std::is_same_v<T, bool>) {
    if (const auto* boolean = node.as_boolean()) {
      return boolean->get();
    }
    wrong_type(place, name, node, "true or false");
  } else if constexpr (std::is_same_v<T, std::int64_t>) {
    if (const auto* integer = node.as_integer()) {
      return integer->get();
    }
    wrong_type(place, name, node, "a whole number");
  } else if constexpr (std::is_same_v<T, double>) {
    if (const auto* integer = node.as_integer()) {
      return static_cast<double>(integer->get());
    }
    if (const auto* number = node.as_floating_point()) {
      return number->get();
    }
    wrong_type(place, name, node, "a number");
  } else if constexpr (std::is_same_v<T, std::string>) {
    if (const auto* text = node.as_string()) {
      const bool relative = bounds.is_path && !text->get().empty() && !std::filesystem::path(text->get()).is_absolute();
      return relative ? (std::filesystem::path(place.folder) / text->get()).lexically_normal().string() : text->get();
    }
    wrong_type(place, name, node, "a string");
  } else { // std::vector or std::array
    const auto* list = node.as_array();
    if (!list) {
      wrong_type(place, name, node, "a list");
    }
    T result{};
    if constexpr (IsArray<T>::value) {
      TORCH_CHECK_VALUE(
          list->size() == result.size(), place.at(node), ": ", name, ": expected a list of ", result.size(),
          " numbers, got ", list->size());
    } else {
      result.resize(list->size());
    }
    for (std::size_t i = 0; i < list->size(); ++i) {
      result[i] = value_of<typename T::value_type>(place, name, (*list)[i], bounds);
    }
    return result;
  }
}

using Setters = std::map<std::string, std::function<void(const Place&, const toml::node&)>, std::less<>>;

Setters setters_for(TrainCommandOptions& options) {
  Setters setters;
  TrainCommandOptions::for_each_part(options, [&](const char*, auto& part) {
    std::decay_t<decltype(part)>::fields(
        [&](std::string_view name, auto member, std::string_view, const Bounds& bounds) {
          setters.emplace(
              name, [&part, name = std::string(name), member, bounds](const Place& place, const toml::node& node) {
                using Member = std::decay_t<decltype(part.*member)>;
                auto value = value_of<Member>(place, name, node, bounds);
                const auto text = violation(value, bounds);
                TORCH_CHECK_VALUE(text.empty(), place.at(node), ": ", name, ": ", text);
                part.*member = std::move(value);
              });
        });
  });
  return setters;
}

std::string read_whole(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::error_code error;
  TORCH_CHECK_VALUE(
      in && std::filesystem::is_regular_file(path, error), "[--config] cannot read '", path,
      "'; check the path and its permissions");
  std::string text(kLargestFile + 1, '\0');
  in.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<std::size_t>(in.gcount()));
  TORCH_CHECK_VALUE(
      text.size() <= kLargestFile, "[--config] '", path, "' is larger than 1 MB; is it a configuration file?");
  return text;
}

/// A value as TOML writes it.
template <class T>
std::string toml_text(const T& value) {
  if constexpr (std::is_same_v<T, std::string>) {
    std::ostringstream out;
    const toml::value<std::string> node(value);
    // Newlines escaped, on one line: of a string over several, TOML drops a newline at the start.
    const bool plain = value.find('\n') == std::string::npos;
    out << toml::toml_formatter(node, plain ? toml::format_flags::allow_literal_strings : toml::format_flags::none);
    return out.str();
  } else if constexpr (std::is_same_v<T, double>) {
    const auto text = option_text(value);
    return text.find_first_of(".en") == std::string::npos ? text + ".0" : text;
  } else if constexpr (std::is_arithmetic_v<T>) {
    return option_text(value);
  } else {
    std::string text = "[";
    for (const auto& element : value) {
      text += (text.size() > 1 ? ", " : "") + toml_text(element);
    }
    return text + "]";
  }
}

} // namespace

void read_config_file(const std::string& path, TrainCommandOptions& options) {
  const Place place{path, std::filesystem::path(path).parent_path().string()};
  toml::table table;
  try {
    table = toml::parse(read_whole(path), path);
  } catch (const toml::parse_error& error) {
    TORCH_CHECK_VALUE(false, path, ":", error.source().begin.line, ": this is not TOML: ", error.description());
  }
  const auto setters = setters_for(options);
  for (const auto& [key, node] : table) {
    const std::string name(key.str());
    const auto setter = setters.find(name);
    if (setter == setters.end()) {
      TORCH_CHECK_VALUE(
          name != "trust_code", place.at(node),
          ": trust_code cannot stand in a file, which may come from elsewhere; give --trust-code");
      const auto nearest = std::min_element(setters.begin(), setters.end(), [&](const auto& a, const auto& b) {
        return edit_distance(name, a.first) < edit_distance(name, b.first);
      });
      TORCH_CHECK_VALUE(
          false, path, ":", key.source().begin.line, ": unknown key '", name, "'; the nearest is '", nearest->first,
          "', ebb train --help lists all");
    }
    setter->second(place, node);
  }
}

std::string config_text(const TrainCommandOptions& options) {
  std::string text;
  TrainCommandOptions::for_each_part(options, [&](const char* title, const auto& part) {
    text += std::string(text.empty() ? "" : "\n") + "# " + title + "\n";
    std::decay_t<decltype(part)>::fields([&](std::string_view name, auto member, std::string_view, const Bounds&) {
      const auto& value = part.*member;
      if constexpr (IsOptional<std::decay_t<decltype(value)>>::value) {
        if (value) {
          text += std::string(name) + " = " + toml_text(*value) + "\n";
        }
      } else {
        text += std::string(name) + " = " + toml_text(value) + "\n";
      }
    });
  });
  return text;
}

} // namespace ebb::app

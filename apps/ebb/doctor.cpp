#include "doctor_checks.h"
#include "subcommand.h"

#include "ebb/base/error.h"

#include <cstdio>
#include <memory>

namespace ebb::app {

std::function<int()> declare_doctor(CLI::App& command, const std::vector<std::string>& /*arguments*/) {
  const auto json = std::make_shared<bool>(false);
  command.add_flag("--json", *json, "Print the checks as JSON.");
  command.footer("Exit code 0 unless a line says fail.");
  return [json] {
    const auto checks = run_all_checks({});
    std::fputs((*json ? as_json(checks) : as_text(checks)).c_str(), stdout);
    return static_cast<int>(any_failed(checks) ? ExitCode::kFailure : ExitCode::kDone);
  };
}

} // namespace ebb::app

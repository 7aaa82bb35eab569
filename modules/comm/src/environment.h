#pragma once

#include "ebb/comm/init.h"

#include <functional>
#include <string>

namespace ebb::comm {

/// The value of an environment variable, nullptr when it is not set; ::getenv or a test's own.
using GetEnv = std::function<const char*(const char* name)>;

/// launch_environment() on any set of variables.
LaunchEnvironment launch_environment(const GetEnv& get_env);

/// The first host of a Slurm node list: "gpu[07-09,12],login1" -> "gpu07".
std::string first_host(const std::string& node_list);

/// Tasks on node `node` by Slurm's list: "4(x2),3" -> 4, 4, 3. 0 when the list does not reach so far.
int tasks_on_node(const std::string& tasks_per_node, int node);

/// Whether `host` names this host's loopback by its spelling.
bool is_loopback(const std::string& host);

} // namespace ebb::comm

#include "environment.h"

#include "ebb/base/error.h"

#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string_view>

namespace ebb::comm {
namespace {

std::optional<int> parse_number(std::string_view text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) {
    return std::nullopt;
  }
  return value;
}

/// A whole number read from the environment, with the variable it came from, so that errors can name both.
struct Number {
  std::string name;
  int value = 0;
  std::string shown() const {
    return name + "=" + std::to_string(value);
  }
};

class Variables {
 public:
  explicit Variables(const GetEnv& get_env) : get_env_(get_env) {}

  /// Not set and empty are the same.
  std::optional<std::string> text(const char* name) const {
    const char* value = get_env_(name);
    return value && *value ? std::optional<std::string>(value) : std::nullopt;
  }

  bool has(const char* name) const {
    return text(name).has_value();
  }

  std::optional<Number> number(const char* name, int least) const {
    const auto value = text(name);
    if (!value) {
      return std::nullopt;
    }
    const auto parsed = parse_number(*value);
    TORCH_CHECK_VALUE(
        parsed && *parsed >= least, "[launch_environment] ", name, " must be a whole number of at least ", least,
        ", got '", *value, "'; unset it, or start the program with torchrun, srun, mpirun or --nproc, which set it");
    return Number{name, *parsed};
  }

  Number required(const char* name, int least, const char* because) const {
    const auto value = number(name, least);
    TORCH_CHECK_VALUE(
        value, "[launch_environment] ", because, "=", text(because).value_or(""), " is set, but ", name,
        " is not; set both or neither");
    return *value;
  }

 private:
  const GetEnv& get_env_;
};

void place(LaunchEnvironment& env, const Number& rank, const Number& world) {
  TORCH_CHECK_VALUE(
      rank.value < world.value, "[launch_environment] ", rank.shown(), " does not fit ", world.shown(),
      ": ranks are 0 to ", world.value - 1, "; give every process a rank of its own below the number of processes");
  env.rank = rank.value;
  env.world_size = world.value;
}

void place_locally(LaunchEnvironment& env, const Number& rank, const Number& world) {
  TORCH_CHECK_VALUE(
      rank.value < world.value, "[launch_environment] ", rank.shown(), " does not fit ", world.shown(),
      ": the processes of one host are 0 to ", world.value - 1, "; correct one of the two");
  TORCH_CHECK_VALUE(
      world.value <= env.world_size, "[launch_environment] ", world.shown(),
      " on one host, but the whole job has only ", env.world_size, " ranks; correct one of the two");
  TORCH_CHECK_VALUE(
      rank.value <= env.rank || env.world_size == world.value, "[launch_environment] ", rank.shown(),
      " on its host cannot belong to rank ", env.rank, " of the job: a host's first rank would be negative");
  env.local_rank = rank.value;
  env.local_world_size = world.value;
}

/// A port that all ranks of one job work out alike; between the well-known ports and Linux's ephemeral ones.
int port_from(const std::string& job) {
  std::uint32_t hash = 2166136261U; // FNV-1a
  for (const unsigned char c : job) {
    hash = (hash ^ c) * 16777619U;
  }
  return static_cast<int>(12000 + hash % 20000);
}

void read_port(const Variables& variables, LaunchEnvironment& env) {
  if (const auto port = variables.number("MASTER_PORT", 1)) {
    TORCH_CHECK_VALUE(
        port->value <= 65535, "[launch_environment] ", port->shown(), " is not a port; ports are 1 to 65535");
    env.master_port = port->value;
  }
}

// Where the launcher says neither address nor port, the ranks must still agree on both.
void find_master(
    const Variables& variables, LaunchEnvironment& env, const std::string& job, const std::string& default_host) {
  read_port(variables, env);
  env.master_addr = variables.text("MASTER_ADDR").value_or(default_host);
  if (env.master_port == 0 && !job.empty()) {
    env.master_port = port_from(job);
  }
  TORCH_CHECK_VALUE(
      env.world_size == 1 || !env.master_addr.empty(), "[launch_environment] MASTER_ADDR is not set, and ",
      env.launcher,
      " does not tell the host of rank 0; set MASTER_ADDR to it for all ranks (mpirun -x MASTER_ADDR=HOST)");
  TORCH_CHECK_VALUE(
      env.world_size == 1 || env.master_port != 0, "[launch_environment] MASTER_PORT is not set, and ", env.launcher,
      " gives no job id to derive it from; set MASTER_PORT to a free port of the host of rank 0 for all ranks");
}

LaunchEnvironment from_ebb(const Variables& variables) {
  LaunchEnvironment env{.launcher = "ebb"};
  place(env, variables.required("EBB_RANK", 0, "EBB_WORLD_SIZE"), variables.required("EBB_WORLD_SIZE", 1, "EBB_RANK"));
  place_locally(
      env, variables.required("EBB_LOCAL_RANK", 0, "EBB_RANK"),
      variables.required("EBB_LOCAL_WORLD_SIZE", 1, "EBB_RANK"));
  const auto port = variables.required("EBB_MASTER_PORT", 1, "EBB_RANK");
  TORCH_CHECK_VALUE(port.value <= 65535, "[launch_environment] ", port.shown(), " is not a port; ports are 1 to 65535");
  env.master_port = port.value;
  env.master_addr = variables.text("EBB_MASTER_ADDR").value_or("127.0.0.1");
  env.store_is_up = true;
  return env;
}

LaunchEnvironment from_torchrun(const Variables& variables) {
  LaunchEnvironment env{.launcher = "torchrun"};
  place(env, variables.required("RANK", 0, "WORLD_SIZE"), variables.required("WORLD_SIZE", 1, "RANK"));
  const auto address = variables.text("MASTER_ADDR");
  TORCH_CHECK_VALUE(
      address || env.world_size == 1, "[launch_environment] WORLD_SIZE=", env.world_size,
      " is set, but MASTER_ADDR is not; set it to the host of rank 0");
  env.master_addr = address.value_or("127.0.0.1");
  read_port(variables, env);
  TORCH_CHECK_VALUE(
      env.master_port != 0 || env.world_size == 1, "[launch_environment] WORLD_SIZE=", env.world_size,
      " is set, but MASTER_PORT is not; set it to a free port of the host of rank 0");
  // Without LOCAL_*, as when RANK and the rest are set by hand: a loopback master means that all ranks are here.
  const bool all_here = is_loopback(env.master_addr);
  const auto local_rank = variables.number("LOCAL_RANK", 0);
  const auto local_world = variables.number("LOCAL_WORLD_SIZE", 1);
  const Number rank = local_rank.value_or(Number{"RANK", all_here ? env.rank : 0});
  place_locally(
      env, rank,
      local_world.value_or(all_here ? Number{"WORLD_SIZE", env.world_size} : Number{rank.name, rank.value + 1}));
  env.store_is_up = variables.text("TORCHELASTIC_USE_AGENT_STORE") == "True";
  env.attempt = variables.text("TORCHELASTIC_RESTART_COUNT").value_or("0");
  env.token = variables.text("TORCHELASTIC_RUN_ID").value_or("");
  return env;
}

LaunchEnvironment from_open_mpi(const Variables& variables) {
  LaunchEnvironment env{.launcher = "mpirun"};
  place(
      env, variables.required("OMPI_COMM_WORLD_RANK", 0, "OMPI_COMM_WORLD_SIZE"),
      variables.required("OMPI_COMM_WORLD_SIZE", 1, "OMPI_COMM_WORLD_RANK"));
  place_locally(
      env, variables.required("OMPI_COMM_WORLD_LOCAL_RANK", 0, "OMPI_COMM_WORLD_RANK"),
      variables.required("OMPI_COMM_WORLD_LOCAL_SIZE", 1, "OMPI_COMM_WORLD_RANK"));
  // Open MPI 5 and 4; the same for all ranks of one mpirun.
  env.token = variables.text("PMIX_NAMESPACE").value_or(variables.text("OMPI_MCA_ess_base_jobid").value_or(""));
  find_master(variables, env, env.token, env.local_world_size == env.world_size ? "127.0.0.1" : "");
  return env;
}

LaunchEnvironment from_slurm(const Variables& variables) {
  LaunchEnvironment env{.launcher = "srun"};
  const char* world = variables.has("SLURM_STEP_NUM_TASKS") ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS";
  place(env, variables.required("SLURM_PROCID", 0, world), variables.required(world, 1, "SLURM_PROCID"));

  const auto nodes =
      variables.text("SLURM_STEP_NODELIST")
          .value_or(variables.text("SLURM_JOB_NODELIST").value_or(variables.text("SLURM_NODELIST").value_or("")));
  const auto tasks =
      variables.text("SLURM_STEP_TASKS_PER_NODE").value_or(variables.text("SLURM_TASKS_PER_NODE").value_or(""));
  const auto per_node = variables.number("SLURM_NTASKS_PER_NODE", 1);
  const auto node = variables.number("SLURM_NODEID", 0);
  const Number local = variables.required("SLURM_LOCALID", 0, "SLURM_PROCID");
  const auto num_nodes =
      variables.number(variables.has("SLURM_STEP_NUM_NODES") ? "SLURM_STEP_NUM_NODES" : "SLURM_NNODES", 1);
  Number here{"SLURM_TASKS_PER_NODE", tasks_on_node(tasks, node ? node->value : 0)};
  if (num_nodes && num_nodes->value == 1) {
    here = {world, env.world_size};
  } else if (here.value == 0 && per_node) {
    here = {"SLURM_NTASKS_PER_NODE", std::min(per_node->value, env.world_size)};
  } else if (here.value == 0) {
    here = {"SLURM_LOCALID", local.value + 1};
  }
  place_locally(env, local, here);

  const auto job = variables.text("SLURM_JOB_ID").value_or(variables.text("SLURM_JOBID").value_or(""));
  const auto step = variables.text("SLURM_STEP_ID").value_or(variables.text("SLURM_STEPID").value_or(""));
  env.token = job.empty() ? "" : "slurm " + job + "." + step;
  find_master(variables, env, env.token, num_nodes && num_nodes->value == 1 ? "127.0.0.1" : first_host(nodes));
  return env;
}

LaunchEnvironment from_pmi(const Variables& variables) {
  LaunchEnvironment env{.launcher = "mpirun"};
  place(env, variables.required("PMI_RANK", 0, "PMI_SIZE"), variables.required("PMI_SIZE", 1, "PMI_RANK"));
  if (variables.has("MPI_LOCALRANKID")) {
    place_locally(
        env, variables.required("MPI_LOCALRANKID", 0, "PMI_RANK"),
        variables.required("MPI_LOCALNRANKS", 1, "MPI_LOCALRANKID"));
  } else if (is_loopback(variables.text("MASTER_ADDR").value_or(""))) {
    place_locally(env, {"PMI_RANK", env.rank}, {"PMI_SIZE", env.world_size});
  }
  const bool one_host = variables.has("MPI_LOCALNRANKS") && env.local_world_size == env.world_size;
  find_master(variables, env, "", one_host ? "127.0.0.1" : "");
  return env;
}

// torchrun numbers its ranks itself, also below srun or mpirun. Variables set by hand must agree with the launcher: one
// RANK exported to all processes of a job would make them all the same rank.
void check_agreement(const Variables& variables, const LaunchEnvironment& env) {
  if (env.launcher != "torchrun" || variables.has("TORCHELASTIC_RUN_ID")) {
    return;
  }
  const std::pair<const char*, const char*> launchers[] = {
      {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},
      {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS"},
      {"PMI_RANK", "PMI_SIZE"}};
  for (const auto& [rank_name, world_name] : launchers) {
    const auto rank = variables.number(rank_name, 0);
    const auto world = variables.number(world_name, 1);
    TORCH_CHECK_VALUE(
        !rank || !world || world->value != env.world_size || rank->value == env.rank,
        "[launch_environment] RANK=", env.rank, " and WORLD_SIZE=", env.world_size, " contradict ", rank->shown(),
        " and ", world->shown(), "; unset RANK and WORLD_SIZE, or start the ranks with torchrun");
  }
}

LaunchEnvironment detect(const Variables& variables) {
  if (variables.has("EBB_RANK") || variables.has("EBB_WORLD_SIZE")) {
    return from_ebb(variables);
  }
  if (variables.has("RANK") || variables.has("WORLD_SIZE")) {
    return from_torchrun(variables);
  }
  if (variables.has("OMPI_COMM_WORLD_RANK") || variables.has("OMPI_COMM_WORLD_SIZE")) {
    return from_open_mpi(variables);
  }
  // Slurm also sets SLURM_PROCID=0 and SLURM_NTASKS in the batch script itself, which is not a step of srun.
  const bool batch_script =
      variables.has("SLURM_JOB_ID") && !variables.has("SLURM_STEP_ID") && !variables.has("SLURM_STEPID");
  if (variables.has("SLURM_PROCID") && !batch_script) {
    return from_slurm(variables);
  }
  if (variables.has("PMI_RANK") || variables.has("PMI_SIZE")) {
    return from_pmi(variables);
  }
  return {};
}

} // namespace

LaunchEnvironment launch_environment(const GetEnv& get_env) {
  const Variables variables(get_env);
  LaunchEnvironment env = detect(variables);
  check_agreement(variables, env);
  if (const auto token = variables.text("EBB_TOKEN")) {
    env.token = *token;
  }
  return env;
}

LaunchEnvironment launch_environment() {
  return launch_environment([](const char* name) -> const char* { return std::getenv(name); });
}

std::string first_host(const std::string& node_list) {
  const auto open = node_list.find_first_of("[,");
  if (open == std::string::npos || node_list[open] == ',') {
    return node_list.substr(0, open);
  }
  const auto close = node_list.find(']', open);
  if (close == std::string::npos) {
    return "";
  }
  const auto inside = node_list.substr(open + 1, close - open - 1);
  const auto number = inside.substr(0, inside.find_first_of("-,"));
  // What follows the bracket belongs to the name up to the next comma; it may hold brackets of its own.
  return first_host(node_list.substr(0, open) + number + node_list.substr(close + 1));
}

int tasks_on_node(const std::string& tasks_per_node, int node) {
  std::string_view rest = tasks_per_node;
  int first = 0;
  while (!rest.empty()) {
    const auto comma = rest.find(',');
    const auto item = rest.substr(0, comma);
    rest = comma == std::string_view::npos ? std::string_view() : rest.substr(comma + 1);
    const auto paren = item.find("(x");
    const auto tasks = parse_number(item.substr(0, paren));
    auto nodes = std::optional<int>(1);
    if (paren != std::string_view::npos) {
      nodes = item.back() == ')' ? parse_number(item.substr(paren + 2, item.size() - paren - 3)) : std::nullopt;
    }
    if (!tasks || !nodes || *tasks < 0 || *nodes < 1) {
      return 0;
    }
    if (node - first < *nodes) {
      return *tasks;
    }
    first += *nodes;
  }
  return 0;
}

bool is_loopback(const std::string& host) {
  return host == "localhost" || host == "::1" || host.starts_with("127.");
}

} // namespace ebb::comm

#include "environment.h"

#include "ebb/base/error.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

namespace ebb::comm {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Settings = std::map<std::string, std::string>;

LaunchEnvironment read(const Settings& settings) {
  return launch_environment([&settings](const char* name) -> const char* {
    const auto found = settings.find(name);
    return found == settings.end() ? nullptr : found->second.c_str();
  });
}

std::string error_of(const Settings& settings) {
  try {
    read(settings);
  } catch (const c10::ValueError& error) {
    return message_of(error);
  }
  return "no error";
}

Settings with(Settings settings, const Settings& changes) {
  for (const auto& [name, value] : changes) {
    settings[name] = value;
  }
  return settings;
}

const Settings kEbb{
    {"EBB_RANK", "2"},
    {"EBB_WORLD_SIZE", "4"},
    {"EBB_LOCAL_RANK", "2"},
    {"EBB_LOCAL_WORLD_SIZE", "4"},
    {"EBB_MASTER_PORT", "40001"},
    {"EBB_TOKEN", "secret"}};
const Settings kTorchrun{{"RANK", "5"},
                         {"WORLD_SIZE", "8"},
                         {"LOCAL_RANK", "1"},
                         {"LOCAL_WORLD_SIZE", "4"},
                         {"MASTER_ADDR", "node7"},
                         {"MASTER_PORT", "29500"}};
const Settings kSrun{{"SLURM_PROCID", "5"},  {"SLURM_NTASKS", "7"},  {"SLURM_LOCALID", "1"},
                     {"SLURM_STEP_ID", "0"}, {"SLURM_JOB_ID", "42"}, {"SLURM_TASKS_PER_NODE", "4,3"},
                     {"SLURM_NODEID", "1"},  {"SLURM_NNODES", "2"},  {"SLURM_JOB_NODELIST", "gpu[07-08]"}};
const Settings kOpenMpi{
    {"OMPI_COMM_WORLD_RANK", "1"},
    {"OMPI_COMM_WORLD_SIZE", "2"},
    {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
    {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
    {"PMIX_NAMESPACE", "prterun-a-1@1"}};

TEST(LaunchEnvironment, IsAWorldOfOneWhenNothingIsSet) {
  const auto env = read({});
  EXPECT_EQ(env.rank, 0);
  EXPECT_EQ(env.world_size, 1);
  EXPECT_EQ(env.launcher, "none");
}

TEST(LaunchEnvironment, ReadsTheOwnLauncher) {
  const auto env = read(kEbb);
  EXPECT_EQ(env.launcher, "ebb");
  EXPECT_EQ(env.rank, 2);
  EXPECT_EQ(env.world_size, 4);
  EXPECT_EQ(env.local_rank, 2);
  EXPECT_EQ(env.local_world_size, 4);
  EXPECT_EQ(env.master_addr, "127.0.0.1");
  EXPECT_EQ(env.master_port, 40001);
  EXPECT_EQ(env.token, "secret");
  EXPECT_TRUE(env.store_is_up);
}

TEST(LaunchEnvironment, ReadsTorchrun) {
  const auto env = read(kTorchrun);
  EXPECT_EQ(env.launcher, "torchrun");
  EXPECT_EQ(env.rank, 5);
  EXPECT_EQ(env.world_size, 8);
  EXPECT_EQ(env.local_rank, 1);
  EXPECT_EQ(env.local_world_size, 4);
  EXPECT_EQ(env.master_addr, "node7");
  EXPECT_EQ(env.master_port, 29500);
  EXPECT_FALSE(env.store_is_up);
  EXPECT_EQ(env.attempt, "0");
}

TEST(LaunchEnvironment, KnowsTheStoreOfTorchrunsAgent) {
  const auto env = read(with(
      kTorchrun, {{"TORCHELASTIC_USE_AGENT_STORE", "True"},
                  {"TORCHELASTIC_RUN_ID", "run-9"},
                  {"TORCHELASTIC_RESTART_COUNT", "3"}}));
  EXPECT_TRUE(env.store_is_up);
  EXPECT_EQ(env.token, "run-9");
  EXPECT_EQ(env.attempt, "3");
  EXPECT_FALSE(read(with(kTorchrun, {{"TORCHELASTIC_USE_AGENT_STORE", "False"}})).store_is_up);
}

TEST(LaunchEnvironment, TakesRanksSetByHandOnLoopbackAsLocal) {
  const auto env = read({{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "29500"}});
  EXPECT_EQ(env.local_rank, 1);
  EXPECT_EQ(env.local_world_size, 2);
}

TEST(LaunchEnvironment, ReadsSrun) {
  const auto env = read(kSrun);
  EXPECT_EQ(env.launcher, "srun");
  EXPECT_EQ(env.rank, 5);
  EXPECT_EQ(env.world_size, 7);
  EXPECT_EQ(env.local_rank, 1);
  EXPECT_EQ(env.local_world_size, 3);
  EXPECT_EQ(env.master_addr, "gpu07");
  EXPECT_EQ(env.token, "slurm 42.0");
}

TEST(LaunchEnvironment, DerivesOnePortForAllRanksOfASlurmStep) {
  const auto port = read(kSrun).master_port;
  EXPECT_GE(port, 12000);
  EXPECT_LT(port, 32000);
  EXPECT_EQ(
      read(with(kSrun, {{"SLURM_PROCID", "0"}, {"SLURM_LOCALID", "0"}, {"SLURM_NODEID", "0"}})).master_port, port);
  EXPECT_NE(read(with(kSrun, {{"SLURM_STEP_ID", "1"}})).master_port, port);
  EXPECT_EQ(read(with(kSrun, {{"MASTER_PORT", "1234"}, {"MASTER_ADDR", "other"}})).master_port, 1234);
  EXPECT_EQ(read(with(kSrun, {{"MASTER_ADDR", "other"}})).master_addr, "other");
}

TEST(LaunchEnvironment, TakesAnSrunOfOneNodeAsLocal) {
  const auto env = read(
      {{"SLURM_PROCID", "1"},
       {"SLURM_NTASKS", "2"},
       {"SLURM_LOCALID", "1"},
       {"SLURM_NNODES", "1"},
       {"SLURM_JOB_ID", "42"},
       {"SLURM_STEP_ID", "0"}});
  EXPECT_EQ(env.master_addr, "127.0.0.1");
  EXPECT_EQ(env.local_world_size, 2);
}

TEST(LaunchEnvironment, TakesASlurmBatchScriptAsAPlainStart) {
  auto batch = kSrun;
  batch.erase("SLURM_STEP_ID");
  EXPECT_EQ(read(batch).world_size, 1);
  EXPECT_EQ(read(batch).launcher, "none");
}

TEST(LaunchEnvironment, ReadsOpenMpiOnOneHost) {
  const auto env = read(kOpenMpi);
  EXPECT_EQ(env.launcher, "mpirun");
  EXPECT_EQ(env.rank, 1);
  EXPECT_EQ(env.world_size, 2);
  EXPECT_EQ(env.local_rank, 1);
  EXPECT_EQ(env.local_world_size, 2);
  EXPECT_EQ(env.master_addr, "127.0.0.1");
  EXPECT_EQ(
      env.master_port,
      read(with(kOpenMpi, {{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "0"}})).master_port);
}

TEST(LaunchEnvironment, AsksForTheMasterOfOpenMpiOnSeveralHosts) {
  const auto several = with(kOpenMpi, {{"OMPI_COMM_WORLD_LOCAL_SIZE", "1"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "0"}});
  EXPECT_THAT(error_of(several), AllOf(HasSubstr("MASTER_ADDR"), HasSubstr("mpirun")));
  EXPECT_EQ(read(with(several, {{"MASTER_ADDR", "node1"}})).master_addr, "node1");
}

TEST(LaunchEnvironment, ReadsPmi) {
  const Settings pmi{{"PMI_RANK", "1"}, {"PMI_SIZE", "4"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "4"}};
  EXPECT_THAT(error_of(pmi), HasSubstr("MASTER_PORT"));
  const auto env = read(with(pmi, {{"MASTER_PORT", "29501"}}));
  EXPECT_EQ(env.launcher, "mpirun");
  EXPECT_EQ(env.rank, 1);
  EXPECT_EQ(env.world_size, 4);
  EXPECT_EQ(env.local_world_size, 4);
  EXPECT_EQ(env.master_addr, "127.0.0.1");
}

TEST(LaunchEnvironment, TheInnermostLauncherCounts) {
  auto all = kEbb;
  all.insert(kTorchrun.begin(), kTorchrun.end());
  all.insert(kSrun.begin(), kSrun.end());
  EXPECT_EQ(read(all).launcher, "ebb");
  auto below_srun = kTorchrun;
  below_srun.insert(kSrun.begin(), kSrun.end());
  EXPECT_EQ(read(below_srun).launcher, "torchrun");
  auto below_batch = kOpenMpi;
  below_batch.insert(kSrun.begin(), kSrun.end());
  EXPECT_EQ(read(below_batch).launcher, "mpirun");
}

TEST(LaunchEnvironment, RefusesWhatIsNotANumberAndNamesIt) {
  for (const char* bad : {"x", "1x", "-1", "1.5", " 1", "99999999999999999999"}) {
    EXPECT_THAT(error_of(with(kTorchrun, {{"RANK", bad}})), AllOf(HasSubstr("RANK"), HasSubstr(bad))) << bad;
  }
  EXPECT_THAT(error_of(with(kSrun, {{"SLURM_LOCALID", "one"}})), AllOf(HasSubstr("SLURM_LOCALID"), HasSubstr("one")));
  EXPECT_THAT(
      error_of(with(kTorchrun, {{"MASTER_PORT", "70000"}})), AllOf(HasSubstr("MASTER_PORT"), HasSubstr("70000")));
  EXPECT_THAT(error_of(with(kTorchrun, {{"WORLD_SIZE", "0"}})), HasSubstr("WORLD_SIZE"));
}

TEST(LaunchEnvironment, RefusesContradictionsAndNamesBothSides) {
  EXPECT_THAT(error_of(with(kTorchrun, {{"RANK", "8"}})), AllOf(HasSubstr("RANK=8"), HasSubstr("WORLD_SIZE=8")));
  EXPECT_THAT(
      error_of(with(kTorchrun, {{"LOCAL_RANK", "4"}})),
      AllOf(HasSubstr("LOCAL_RANK=4"), HasSubstr("LOCAL_WORLD_SIZE=4")));
  EXPECT_THAT(error_of(with(kTorchrun, {{"LOCAL_WORLD_SIZE", "9"}})), HasSubstr("LOCAL_WORLD_SIZE=9"));
  EXPECT_THAT(error_of({{"RANK", "1"}}), AllOf(HasSubstr("RANK=1"), HasSubstr("WORLD_SIZE")));
  EXPECT_THAT(error_of({{"WORLD_SIZE", "2"}}), AllOf(HasSubstr("WORLD_SIZE=2"), HasSubstr("RANK")));
  EXPECT_THAT(error_of({{"EBB_RANK", "0"}}), HasSubstr("EBB_WORLD_SIZE"));
  EXPECT_THAT(error_of({{"RANK", "0"}, {"WORLD_SIZE", "2"}}), HasSubstr("MASTER_ADDR"));
  EXPECT_THAT(error_of({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "a"}}), HasSubstr("MASTER_PORT"));
}

TEST(LaunchEnvironment, RefusesOneRankExportedToAllProcessesOfASlurmStep) {
  const Settings exported{
      {"RANK", "0"},         {"WORLD_SIZE", "2"},           {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "29500"},
      {"SLURM_PROCID", "1"}, {"SLURM_STEP_NUM_TASKS", "2"}, {"SLURM_LOCALID", "1"}};
  EXPECT_THAT(error_of(exported), AllOf(HasSubstr("RANK=0"), HasSubstr("SLURM_PROCID=1")));
  // torchrun numbers its ranks itself.
  EXPECT_EQ(read(with(exported, {{"TORCHELASTIC_RUN_ID", "none"}})).rank, 0);
}

TEST(FirstHost, UnfoldsSlurmsBrackets) {
  EXPECT_EQ(first_host("gpu[07-09,12],login1"), "gpu07");
  EXPECT_EQ(first_host("login1,gpu[07-09]"), "login1");
  EXPECT_EQ(first_host("rack[2,4]-node[001-016].cluster"), "rack2-node001.cluster");
  EXPECT_EQ(first_host("solo"), "solo");
  EXPECT_EQ(first_host("a[1-2"), "");
  EXPECT_EQ(first_host(""), "");
}

TEST(TasksOnNode, ReadsSlurmsRepetitions) {
  EXPECT_EQ(tasks_on_node("4(x2),3", 0), 4);
  EXPECT_EQ(tasks_on_node("4(x2),3", 1), 4);
  EXPECT_EQ(tasks_on_node("4(x2),3", 2), 3);
  EXPECT_EQ(tasks_on_node("4(x2),3", 3), 0);
  EXPECT_EQ(tasks_on_node("8", 0), 8);
  EXPECT_EQ(tasks_on_node("", 0), 0);
  EXPECT_EQ(tasks_on_node("4(x", 0), 0);
}

} // namespace
} // namespace ebb::comm

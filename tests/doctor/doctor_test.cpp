#include "doctor_checks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <sys/resource.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <map>

namespace ebb::app {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using ::testing::Not;

/// A machine whose proc/, sys/ and environment are written by the test.
class FakeMachine {
 public:
  FakeMachine() {
    std::string pattern = (fs::temp_directory_path() / "ebb_doctor_XXXXXX").string();
    machine_.root = mkdtemp(pattern.data());
    machine_.variable = [this](const std::string& name) -> std::optional<std::string> {
      const auto found = variables.find(name);
      return found == variables.end() ? std::nullopt : std::optional(found->second);
    };
  }
  ~FakeMachine() {
    fs::remove_all(machine_.root);
  }
  void write(const std::string& path, const std::string& text) {
    fs::create_directories((machine_.root / path).parent_path());
    std::ofstream(machine_.root / path) << text << '\n';
  }
  const Machine& get() const {
    return machine_;
  }

  std::map<std::string, std::string> variables;

 private:
  Machine machine_;
};

TEST(Doctor, CoresHonourTheCgroupQuotaOfAnyFolderAbove) {
  FakeMachine machine;
  machine.write("proc/self/cgroup", "0::/slice/job");
  machine.write("sys/fs/cgroup/slice/job/cpu.max", "max 100000");
  machine.write("sys/fs/cgroup/slice/cpu.max", "50000 100000");
  machine.variables["OMP_NUM_THREADS"] = "1";
  const auto check = check_cores(machine.get());
  EXPECT_EQ(check.verdict, Verdict::kOk);
  EXPECT_THAT(check.value, HasSubstr("limited to 0.5 by the cgroup"));
}

TEST(Doctor, CoresWithoutAQuotaAreTheUsableOnes) {
  FakeMachine machine;
  machine.write("proc/self/cgroup", "0::/");
  machine.write("sys/fs/cgroup/cpu.max", "max 100000");
  EXPECT_THAT(check_cores(machine.get()).value, Not(HasSubstr("limited")));
}

TEST(Doctor, MoreThreadsThanCoresIsAWarningAndNoNumberAFailure) {
  FakeMachine machine;
  machine.write("sys/fs/cgroup/cpu.max", "100000 100000");
  machine.variables["OMP_NUM_THREADS"] = "4096";
  EXPECT_EQ(check_cores(machine.get()).verdict, Verdict::kWarn);
  EXPECT_THAT(check_cores(machine.get()).remedy, HasSubstr("OMP_NUM_THREADS=1"));
  for (const char* wrong : {"many", "0", "-1", "", "nan"}) {
    machine.variables["OMP_NUM_THREADS"] = wrong;
    EXPECT_EQ(check_cores(machine.get()).verdict, Verdict::kFail) << wrong;
  }
}

TEST(Doctor, MemoryHonoursTheCgroupLimit) {
  FakeMachine machine;
  machine.write("proc/meminfo", "MemTotal: 16000000 kB\nMemAvailable:   8000000 kB");
  EXPECT_EQ(check_memory(machine.get()).verdict, Verdict::kOk);
  EXPECT_EQ(check_memory(machine.get()).value, "8.2 GB available");
  machine.write("proc/self/cgroup", "0::/job");
  machine.write("sys/fs/cgroup/job/memory.max", "1000000000");
  const auto limited = check_memory(machine.get());
  EXPECT_EQ(limited.verdict, Verdict::kWarn);
  EXPECT_EQ(limited.value, "8.2 GB available, limited to 1.0 GB by the cgroup");
}

TEST(Doctor, NoMemoryLimitIsNotTakenForOne) {
  FakeMachine machine;
  machine.write("proc/meminfo", "MemAvailable:   8000000 kB");
  machine.write("sys/fs/cgroup/memory.max", "max");
  machine.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712");
  EXPECT_EQ(check_memory(machine.get()).value, "8.2 GB available");
}

TEST(Doctor, AFolderThatIsNotThereFailsTheDiskCheck) {
  Machine machine;
  machine.directory = fs::temp_directory_path() / "ebb-doctor-no-such-folder";
  EXPECT_EQ(check_disk(machine).verdict, Verdict::kFail);
  machine.directory = fs::temp_directory_path();
  EXPECT_THAT(check_disk(machine).value, HasSubstr("GB free"));
}

TEST(Doctor, AnInterfaceThatIsNotThereFailsAndTheRemedyNamesThoseThatAre) {
  FakeMachine machine;
  EXPECT_EQ(check_interface(machine.get()).verdict, Verdict::kOk);
  machine.variables["GLOO_SOCKET_IFNAME"] = "nosuch0";
  const auto check = check_interface(machine.get());
  EXPECT_EQ(check.verdict, Verdict::kFail);
  EXPECT_THAT(check.value, HasSubstr("nosuch0"));
  EXPECT_THAT(check.remedy, HasSubstr("lo"));
  machine.variables["GLOO_SOCKET_IFNAME"] = "lo";
  EXPECT_THAT(check_interface(machine.get()).value, HasSubstr("127.0.0.1"));
}

TEST(Doctor, AGpuThatTheBuildCannotUseIsAWarning) {
  FakeMachine machine;
  machine.write("proc/driver/nvidia/gpus/0000:01:00.0/information", "Model: a GPU");
  EXPECT_EQ(check_gpus(machine.get(), /*built_with_cuda=*/false).verdict, Verdict::kWarn);
  const auto usable = check_gpus(machine.get(), /*built_with_cuda=*/true);
  EXPECT_EQ(usable.verdict, Verdict::kOk);
  EXPECT_NE(usable.value, "none");
}

TEST(Doctor, FewOpenFilesAreAWarning) {
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit low = before;
  low.rlim_cur = 512;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &low), 0);
  const auto check = check_open_files();
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_EQ(check.verdict, Verdict::kWarn);
  EXPECT_EQ(check.value, "512 allowed");
}

TEST(Doctor, GlooAddsUpOverTwoRanks) {
  const auto check = check_gloo();
  EXPECT_EQ(check.verdict, Verdict::kOk) << check.value;
  EXPECT_THAT(check.value, HasSubstr("two ranks added up"));
}

TEST(Doctor, AGlooGroupThatCannotFormFailsWithTheReason) {
  const auto check = check_gloo("192.0.2.1"); // reserved for documentation, so no host has it
  ASSERT_EQ(name_of(check.verdict), "fail") << check.value;
  EXPECT_FALSE(check.value.empty());
  EXPECT_THAT(check.remedy, HasSubstr("127.0.0.1"));
  RecordProperty("reason", check.value);
}

TEST(Doctor, PeerMemoryIsReadOrTheReasonGiven) {
  const auto check = check_same_host_reads();
  if (check.verdict == Verdict::kOk) {
    EXPECT_THAT(check.value, HasSubstr("may read"));
  } else {
    EXPECT_EQ(check.verdict, Verdict::kWarn);
    EXPECT_THAT(check.value, HasSubstr("process_vm_readv"));
  }
}

TEST(Doctor, LoopbackPortsCanBeOpened) {
  EXPECT_EQ(check_loopback_port().verdict, Verdict::kOk) << check_loopback_port().value;
}

TEST(Doctor, EveryCheckReportsOnceAndARemedyWhereItIsNotFine) {
  const auto checks = run_all_checks({});
  std::map<std::string, int> seen;
  for (const auto& check : checks) {
    ++seen[check.what];
    EXPECT_FALSE(check.value.empty()) << check.what;
    EXPECT_EQ(check.remedy.empty(), check.verdict == Verdict::kOk) << check.what;
  }
  for (const char* what :
       {"versions", "gloo", "peer memory", "nccl", "gpus", "loopback", "interface", "host name", "cores", "memory",
        "disk", "open files"}) {
    EXPECT_EQ(seen[what], 1) << what;
  }
  EXPECT_EQ(seen.size(), checks.size());
}

TEST(Doctor, ReportIsOneLineACheckAndTheSameAsJson) {
  const std::vector<Check> checks{
      {.what = "disk", .value = "9 GB"}, {Verdict::kFail, "loopback", "none \xff", "bring it up"}};
  EXPECT_EQ(as_text(checks), "ok    disk      9 GB\nfail  loopback  none \xff  -> bring it up\n");
  const auto report = nlohmann::json::parse(as_json(checks));
  EXPECT_FALSE(report["ok"].get<bool>());
  EXPECT_EQ(report["checks"].size(), 2u);
  EXPECT_EQ(report["checks"][1]["verdict"], "fail");
  EXPECT_EQ(report["checks"][1]["remedy"], "bring it up");
  EXPECT_TRUE(any_failed(checks));
  EXPECT_FALSE(any_failed({checks[0]}));
}

} // namespace
} // namespace ebb::app

"""tools/check_parity finds every fault of a page, by reports that ctest itself wrote."""
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

CHECK = os.environ["CHECK_PARITY"]
CTEST = os.environ["CTEST"]
ENVIRONMENT = {**os.environ, "PATH": f"{pathlib.Path(CTEST).parent}{os.pathsep}{os.environ['PATH']}"}

# A build folder as CMake leaves it: tests of every outcome. The values of parameters look as GoogleTest prints them.
TESTS = r"""
add_test(Good.First "true")
add_test(Good.Second "true")
add_test(Good.ByName.third "true")
add_test([==[All/Many.Agree/one_a  # GetParam() = (4-byte object <00-11>, "a" & "b")]==] "true")
add_test([==[All/Many.Agree/two_a  # GetParam() = 2]==] "true")
add_test([==[All/Many.Differ/one  # GetParam() = 1]==] "true")
add_test([==[All/Many.Differ/two  # GetParam() = 2]==] "false")
add_test([==[Few/Many.Differ/one  # GetParam() = 1]==] "true")
add_test(Bad.Fails "false")
add_test(Bad.HasNoProgram "/nonexistent/program")
set_tests_properties(Bad.HasNoProgram PROPERTIES LABELS gpu)
add_test(Bad.IsDisabled "true")
set_tests_properties(Bad.IsDisabled PROPERTIES DISABLED TRUE LABELS gpu)
add_test(Bad.NeedsOutput "true")
set_tests_properties(Bad.NeedsOutput PROPERTIES PASS_REGULAR_EXPRESSION "some")
add_test(Good.Pretends "printf" "9/9 Test: Bad.Pretended\nTest Passed.\n")
add_test(Bad.IsSkipped "echo" "[  SKIPPED ] here")
set_tests_properties(Bad.IsSkipped PROPERTIES SKIP_REGULAR_EXPRESSION "SKIPPED" LABELS unit)
add_test(Gpu.IsSkipped "echo" "[  SKIPPED ] here")
set_tests_properties(Gpu.IsSkipped PROPERTIES SKIP_REGULAR_EXPRESSION "SKIPPED" LABELS "unit;gpu")
"""
UPSTREAM = "# Page\n\n| Upstream file | Subject | Shown by |\n|---|---|---|\n"
REPORTS = "\n| Reports | Behaviour | Shown by |\n|---|---|---|\n"
HEADER = "# Page\n\n| PyTorch | ebb | Shown by |\n|---|---|---|\n"  # the first row is line 5


class CheckParity(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.kept = tempfile.TemporaryDirectory()
        cls.build = pathlib.Path(cls.kept.name)
        cls.junit = cls.build / "tests.xml"
        cls.log = cls.build / "Testing/Temporary/LastTest.log"
        (cls.build / "CTestTestfile.cmake").write_text(TESTS)
        command = [CTEST, "--test-dir", str(cls.build), "--output-junit", str(cls.junit)]
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=60)

    @classmethod
    def tearDownClass(cls):
        cls.kept.cleanup()

    def run_on(self, text, *arguments):
        page = self.build / "page.md"
        page.write_text(text)
        command = [sys.executable, CHECK, "--page", str(page), "--build", str(self.build), *arguments]
        done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
        return done, [line.replace(f"{page}:", "", 1) for line in done.stderr.splitlines()]

    def faults(self, cells, log=False):
        """The faults of a page whose rows have these last cells, the same from a JUnit report as from the log."""
        text = HEADER + "".join(f"| `feature{i}` | `ebb` | {cell} |\n" for i, cell in enumerate(cells))
        done, faults = self.run_on(text, *([] if log else ["--report", str(self.junit)]))
        self.assertEqual(done.returncode, 1 if faults else 0, done.stderr)
        if not log:
            report = f"in {self.log}"
            other = [fault.replace(report, f"in {self.junit}") for fault in self.faults(cells, log=True)]
            self.assertEqual([fault.split(self.kept.name)[0] for fault in other],
                             [fault.split(self.kept.name)[0] for fault in faults])
        return faults

    def test_a_good_page_passes_and_its_rows_are_counted(self):
        text = HEADER + """\
| a \\| b | `x` | `Good.First` |
| c | `x` | `Good.First`, `Good.Second`, `Good.ByName.third` |
| d | `x` | `Good.Second`; not yet: the other half |
| e | | not yet |
| f | | no meaning in C++: it is about Python |

Text, and no table:

```
| in | a | code | block |
```
"""
        done, faults = self.run_on(text, "--report", str(self.junit))
        self.assertEqual((done.returncode, faults), (0, []))
        self.assertIn("2 of 5 rows not yet (1 of them in part), 1 with no meaning in C++, 3 tests named", done.stdout)

    def test_a_test_that_is_not_in_the_report_did_not_run(self):
        faults = self.faults(["`Good.First`", "`Good.Third`, `Good.Second`", "`Bad.Pretended`"])
        self.assertEqual(len(faults), 2)
        self.assertRegex(faults[0], r"^6: `Good\.Third` did not run: .* has no test of this name$")
        self.assertRegex(faults[1], r"^7: `Bad\.Pretended` did not run")

    def test_a_test_must_have_passed(self):
        for name, outcome in [("Bad.Fails", "failed"), ("Bad.NeedsOutput", "failed")]:
            faults = self.faults(["not yet", f"`{name}`"])
            self.assertEqual(len(faults), 1)
            self.assertRegex(faults[0], f"^6: `{name}` did not pass: {outcome} in ")

    def test_a_test_without_program_or_disabled_did_not_pass_whatever_its_label(self):
        for name, outcome in [("Bad.HasNoProgram", "not run"), ("Bad.IsDisabled", "disabled")]:
            done, faults = self.run_on(HEADER + f"| a | b | `{name}` |\n", "--report", str(self.junit))
            self.assertEqual((done.returncode, len(faults)), (1, 1))
            self.assertRegex(faults[0], f"^5: `{name}` did not pass: {outcome} in ")
            done, faults = self.run_on(HEADER + f"| a | b | `{name}` |\n")
            self.assertRegex(faults[0], f"^5: `{name}` did not pass: not run in ")

    def test_only_a_test_for_gpus_may_be_skipped(self):
        self.assertEqual(self.faults(["`Gpu.IsSkipped`"]), [])
        self.assertEqual(
            self.faults(["`Gpu.IsSkipped`, `Bad.IsSkipped`"]),
            ["5: `Bad.IsSkipped` was skipped, which only tests with the label gpu may be"])

    def test_asking_ctest_for_labels_leaves_its_log(self):
        before = self.log.read_bytes()
        self.assertEqual(self.faults(["`Gpu.IsSkipped`"]), [])
        self.assertEqual(self.log.read_bytes(), before)

    def test_parameters_are_named_without_their_values(self):
        self.assertEqual(self.faults(["`All/Many.Agree/one_a`", "`All/Many.Agree/*`", "`*/Many.Agree/*_a`"]), [])
        self.assertEqual(self.faults(["`All/Many.Differ/one`"]), [])
        for name in ["Many.Agree", "All/Many.Agree", "All/Many.Agree/*_b", "Few/Many.Agree/*"]:
            faults = self.faults([f"`{name}`"])
            self.assertEqual(len(faults), 1)
            self.assertIn(f"5: `{name}` did not run", faults[0])

    def test_every_test_that_a_star_takes_in_must_have_passed(self):
        faults = self.faults(["`*/Many.Differ/*`"])
        self.assertEqual(len(faults), 1)
        self.assertRegex(faults[0], "^5: `All/Many.Differ/two` did not pass: failed in ")

    def test_a_star_takes_in_no_other_case(self):
        for name in ["Good.*", "*.First", "All/Many.*/one_a", "*", "Good", "Good First", "All/Many.Agree/one/a"]:
            faults = self.faults([f"`{name}`"])
            self.assertEqual(len(faults), 1)
            self.assertIn(f"5: `{name}` is no name of a test", faults[0])

    def test_one_test_serves_three_rows_at_most(self):
        self.assertEqual(self.faults(3 * ["`Good.First`"] + ["`Good.Second`"]), [])
        faults = self.faults(["`Good.First`", "`Good.First`, `Good.First`", "not yet"] + 3 * ["`Good.First`"])
        self.assertEqual(len(faults), 1)
        self.assertIn("9: `Good.First` serves 5 rows (lines 5, 6, 8, 9, 10), at most 3", faults[0])

    def test_all_parameters_of_a_case_count_as_one_test(self):
        names = ["All/Many.Agree/one_a", "All/Many.Agree/two_a", "All/Many.Agree/*", "*/Many.Agree/*"]
        faults = self.faults([f"`{name}`" for name in names])
        self.assertEqual(len(faults), 1)
        self.assertIn("8: `Many.Agree` serves 4 rows", faults[0])
        self.assertEqual(self.faults(3 * ["`All/Many.Agree/one_a`, `All/Many.Agree/two_a`"]), [])

    def test_fifteen_rows_at_most_have_no_meaning(self):
        self.assertEqual(self.faults(15 * ["no meaning in C++: tracing"]), [])
        faults = self.faults(["not yet"] + 17 * ["no meaning in C++: tracing"])
        self.assertEqual(len(faults), 1)
        self.assertIn("21: 17 rows have the mark 'no meaning in C++', at most 15 may", faults[0])

    def test_a_row_needs_tests_or_a_reason_or_not_yet(self):
        cells = ["", "soon", "Good.First", "`Good.First` and more", "`Good.First` `Good.Second`", "not yet, but soon",
                 "not yet: half", "`Good.First`; not yet:", "`Good.First`; not yet", "Not yet"]
        for cell in cells:
            faults = self.faults([cell])
            self.assertEqual(len(faults), 1)
            self.assertIn(f"5: '`feature0`' has neither tests nor a reason nor 'not yet', got '{cell}'", faults[0])
        for cell in ["no meaning in C++", "no meaning in C++:", "no meaning in C++, it is Python's"]:
            faults = self.faults([cell])
            self.assertEqual(len(faults), 1)
            self.assertIn("5: '`feature0`' has no reason", faults[0])

    def test_no_row_escapes_by_its_form(self):
        report = ["--report", str(self.junit)]
        _, faults = self.run_on(HEADER + "| a | b |\n| a | b | not yet | c |\n| a | b | not yet |\n", *report)
        self.assertEqual([fault.split(",")[0] for fault in faults], ["5: expected 3 cells", "6: expected 3 cells"])
        _, faults = self.run_on("| PyTorch | Shown by |\n|---|---|\n| a | soon |\n", *report)
        tables = ["PyTorch | ebb | Shown by", "Upstream file | Subject | Shown by", "Reports | Behaviour | Shown by"]
        expected = "' or '".join(tables)
        self.assertIn(f"1: expected a table with the columns '{expected}', got 'PyTorch | Shown by'", faults)
        done, faults = self.run_on("Nothing here.\n", *report)
        self.assertEqual((done.returncode, len(faults)), (1, 1))
        self.assertIn("1: no table", faults[0])

    def test_upstreams_files_and_reports_may_rest_on_one_test_and_lack_a_subject_in_any_number(self):
        rows = 5 * "| `test_x` | what | `Good.First`, `Good.Second` |\n"
        rows += 20 * "| `test_y` | what | no subject here: Python |\n"
        text = UPSTREAM + rows + REPORTS + 5 * "| issue 1 | what | `Good.First` |\n"
        done, faults = self.run_on(text, "--report", str(self.junit))
        self.assertEqual((done.returncode, faults), (0, []))
        self.assertIn("0 of 30 rows not yet (0 of them in part), 20 with no subject here, 2 tests named", done.stdout)

    def test_upstreams_rows_say_what_is_missing_and_what_has_no_subject(self):
        text = UPSTREAM + """\
| a | b | `Good.First`; not yet: the rest |
| a | b | `Good.First`; no subject here: DTensor |
| a | b | `Good.First`; not yet: the rest; no subject here: DTensor |
| a | b | not yet: it needs files |
| a | b | not yet |
"""
        done, faults = self.run_on(text, "--report", str(self.junit))
        self.assertEqual((done.returncode, faults), (0, []))
        self.assertIn("4 of 5 rows not yet (2 of them in part), 1 tests named", done.stdout)
        for cell in ["", "`Good.First`; no subject here", "`Good.First`; no subject here: ", "`Good.First`; but soon",
                     "no meaning in C++: why", "`Good.First`; no meaning in C++: why"]:
            _, faults = self.run_on(UPSTREAM + f"| a | b | {cell} |\n", "--report", str(self.junit))
            self.assertEqual(len(faults), 1, cell)
            self.assertIn("5: 'a' has neither tests", faults[0])
        _, faults = self.run_on(UPSTREAM + "| a | b | no subject here |\n", "--report", str(self.junit))
        self.assertIn("5: 'a' has no reason", faults[0])
        # Nor may a feature be without meaning in part.
        self.assertEqual(len(self.faults(["`Good.First`; no subject here: DTensor"])), 1)

    def test_upstreams_tests_must_have_passed_as_well(self):
        for name, why in [("Good.Third", "did not run"), ("Bad.Fails", "did not pass"),
                          ("Bad.IsSkipped", "was skipped"), ("Good.*", "is no name")]:
            text = UPSTREAM + f"| a | b | `{name}`; no subject here: half |\n" + REPORTS + f"| a | b | `{name}` |\n"
            done, faults = self.run_on(text, "--report", str(self.junit))
            self.assertEqual(done.returncode, 1)
            self.assertEqual([fault[:2] for fault in faults], ["5:", "9:"])
            for fault in faults:
                self.assertIn(why, fault)

    def test_several_pages_are_checked_and_the_limits_hold_for_each(self):
        pages = []
        for number in (1, 2):
            page = self.build / f"page{number}.md"
            page.write_text(HEADER + 2 * "| a | b | `Good.First` |\n" + (number - 1) * "| a | b | `Bad.Fails` |\n")
            pages += ["--page", str(page)]
        command = [sys.executable, CHECK, "--build", str(self.build), "--report", str(self.junit), *pages]
        done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
        self.assertEqual(done.returncode, 1)
        self.assertEqual(len(done.stderr.splitlines()), 1)
        self.assertIn("page2.md:7: `Bad.Fails` did not pass", done.stderr)
        self.assertEqual(len(done.stdout.splitlines()), 2)

    def test_what_cannot_be_read_is_named(self):
        text = HEADER + "| a | b | `Good.First` |\n"
        (self.build / "cut.xml").write_text(self.junit.read_text()[:200])
        (self.build / "empty.xml").write_text("<testsuite/>")
        for report, message in [("none.xml", "cannot read"), ("cut.xml", "no JUnit report"), ("empty.xml", "no test")]:
            done, faults = self.run_on(text, "--report", str(self.build / report))
            self.assertEqual((done.returncode, len(faults)), (2, 1), done.stderr)
            self.assertIn(report, faults[0])
            self.assertIn(message, faults[0])


if __name__ == "__main__":
    unittest.main()

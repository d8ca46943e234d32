"""kda support and kda doctor."""

from program import DATA, ProgramTest, kda


class SupportAndDoctor(ProgramTest):
    def test_support_lists_everything(self):
        rows = self.lines(kda("support", "--json"))
        names = [row["impl"] for row in rows]
        self.assertEqual(len(names), len(set(names)))
        self.assertIn("reference_chunk_fwd", names)

    def test_support_lists_what_is_asked_for(self):
        rows = self.lines(kda("support", "--operation", "chunk_fwd", "--impl",
                              "reference,cpu_chunk_fwd", "--device", "cpu", "--json"))
        self.assertEqual({row["impl"] for row in rows}, {"cpu_chunk_fwd", "reference_chunk_fwd"})
        self.check(kda("support", "--device", "cuda:4096"), 3)

    def test_every_implementation_can_be_named_alone(self):
        for row in self.lines(kda("support", "--device", "cpu", "--json")):
            result = kda("support", "--device", "cpu", "--impl", row["impl"], "--json")
            self.check(result, 0)
            self.assertEqual([found["impl"] for found in self.lines(result)], [row["impl"]])

    def test_support_asks_about_states(self):
        ask = ("support", "--shape", "4,1,2,2,32,32", "--operation", "recurrent", "--json")
        rows = self.lines(kda(*ask, "--device", "cpu", "--state-dtype", "bf16", "--pool", "6"))
        self.assertTrue(any(row["chosen"] for row in rows))
        wrong = kda(*ask, "--state-dtype", "int8")
        self.check(wrong, 2)
        self.assertIn("--state-dtype: found int8", wrong.stdout)
        self.check(kda(*ask, "--pool", "-1"), 2)

    def test_support_says_the_workspace_and_keeps_to_a_limit(self):
        ask = ("support", "--shape", "4,100,2,2,32,32", "--operation", "chunk_fwd", "--device",
               "cpu", "--threads", "4", "--impl", "cpu", "--json", "--workspace-limit")
        needed = [self.lines(kda(*ask, limit))[0]["workspace_bytes"] for limit in (0, 10**9)]
        self.assertGreater(needed[0], 0)
        self.assertEqual(needed[0], needed[1])
        less = self.lines(kda(*ask, needed[0] - 1))[0]
        self.assertTrue(less["chosen"])
        self.assertLess(less["workspace_bytes"], needed[0])
        refused = kda(*ask, 1)
        self.check(refused, 3)
        self.assertIn("workspace_limit: found 1 bytes, expected ", refused.stdout)
        self.assertIn(f"workspace {needed[0]} bytes", kda(*ask[:-2]).stdout)

    def test_run_and_bench_keep_to_a_limit(self):
        case = DATA / "beta_zero.safetensors"
        out = self.folder / "limited.safetensors"
        for command in (("run", case, "-o", out),
                        ("bench", "--shape", "1,64,1,1,32,32", "--repeat", "1")):
            self.check(kda(*command, "--device", "cpu", "--workspace-limit", "1"), 3)
            self.check(kda(*command, "--device", "cpu", "--workspace-limit", 10**9), 0)

    def test_support_goes_on_where_the_choice_has_nothing(self):
        result = kda("support", "--shape", "1,64,1,1,32,32", "--device", "cpu", "--impl",
                     "cpu_intra", "--json")
        self.check(result, 3)
        rows = self.lines(result)
        self.assertEqual([row["impl"] for row in rows if row.get("chosen")], ["cpu_intra"])
        refused = [row for row in rows if "error" in row]
        self.assertEqual(len(refused), 10)
        self.assertEqual({(row["exit_code"], row["kind"]) for row in refused},
                         {(3, "unsupported")})

    def test_support_tells_what_a_gpu_that_is_not_here_would_lack(self):
        report = self.lines(kda("doctor", "--device", "cpu", "--json"))[0]
        built = {row["impl"] for row in self.lines(kda("support", "--json"))}
        ask = ("support", "--operation", "chunk_fwd", "--device", "cuda", "--json", "--shape")
        result = kda(*ask, "1,64,1,1,100,64")
        if "sm90_chunk_fwd" not in built:
            self.check(result, 3)
            self.assertIn("this build has no CUDA", result.stderr)
            return
        (reason,) = [row["reason"] for row in self.lines(result)
                     if row["impl"] == "sm90_chunk_fwd"]
        self.assertIn("K = 100 (64 or 128)", reason)
        named = self.lines(kda(*ask[:3], "--impl", "sm90", "--json", "--shape", "1,64,1,1,100,64"))
        self.assertEqual({row["impl"]: row["reason"] for row in named}["sm90_chunk_fwd"], reason)
        if report["cuda"] != "usable":
            self.check(result, 3)
            self.assertEqual(reason, report["cuda"] + ", and K = 100 (64 or 128)")
            fits = self.lines(kda(*ask, "1,64,1,1,128,64"))
            self.assertEqual({row["reason"] for row in fits}, {report["cuda"]})

    def test_support_says_what_is_chosen(self):
        result = kda("support", "--shape", "1,100,2,4,64,64", "--gate", "softplus", "--device",
                     "cpu", "--qk-l2norm", "--beta-sigmoid", "--sequences", "3", "--json")
        self.check(result, 0)
        rows = self.lines(result)
        operations = {row["operation"] for row in rows}
        self.assertEqual(len(operations), 11)
        for operation in operations:
            chosen = [row for row in rows if row["operation"] == operation and row["chosen"]]
            self.assertEqual(len(chosen), 1, operation)
            self.assertTrue(chosen[0]["supported"])
        for row in rows:
            self.assertEqual(row["supported"], row["reason"] == "")

    def test_doctor_passes_its_self_test(self):
        result = kda("doctor", "--device", "cpu", "--json")
        self.check(result, 0)
        (report,) = self.lines(result)
        self.assertEqual(report["devices"][0]["self_test"], "passed")
        self.assertRegex(kda("doctor", "--device", "cpu").stdout, r"(?m)^self-test +passed")

    def test_doctor_tells_what_is_set(self):
        variables = {"KDA_IMPL": "cpu,reference", "KDA_WORKSPACE_LIMIT": "1000000000",
                     "KDA_LOG": "exec"}
        report = self.lines(kda("doctor", "--device", "cpu", "--json", variables=variables))[0]
        self.assertEqual({name: report["environment"].get(name) for name in variables}, variables)

    def test_doctor_of_a_missing_device_is_exit_3(self):
        self.check(kda("doctor", "--device", "cuda:4096"), 3)

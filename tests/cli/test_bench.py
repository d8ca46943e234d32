"""kda bench."""

from program import ProgramTest, kda


class Bench(ProgramTest):
    def test_rows_have_times_costs_and_shares(self):
        for suite in ("train", "prefill", "decode", "stages"):
            with self.subTest(suite):
                result = kda("bench", "--suite", suite, "--shape", "1,64,1,2,32,32", "--repeat",
                             "1", "--device", "cpu", "--json")
                self.check(result, 0)
                machine, *rows = self.lines(result)
                self.assertGreater(machine["copy_gb_per_s"], 0)
                self.assertIn("date", machine)
                self.assertGreater(len(rows), 0)
                for row in rows:
                    self.assertLessEqual(row["p20_ms"], row["median_ms"])
                    self.assertLessEqual(row["median_ms"], row["p80_ms"])
                    self.assertGreater(row["median_ms"], 0)
                    self.assertGreater(row["bytes"], 0)
                    self.assertGreater(row["copy_share"], 0)
                    self.assertGreaterEqual(row["flop"], 0)

    def test_the_results_hold_their_command(self):
        result = kda("bench", "--shape", "1,64,1,1,32,32", "--repeat", "1", "--device", "cpu",
                     "--impl", "cpu_chunk_fwd, cpu_chunk_bwd", "--json")
        self.check(result, 0)
        self.assertEqual(self.lines(result)[0]["command"],
                         "kda bench --shape 1,64,1,1,32,32 --repeat 1 --device cpu "
                         "--impl 'cpu_chunk_fwd, cpu_chunk_bwd' --json")

    def test_shapes_are_timed_one_after_the_other(self):
        shapes = ([1, 64, 1, 1, 32, 32], [2, 32, 1, 2, 32, 16])
        arguments = [word for shape in shapes for word in ("--shape", ",".join(map(str, shape)))]
        result = kda("bench", "--suite", "prefill", *arguments, "--repeat", "1", "--device", "cpu",
                     "--json")
        self.check(result, 0)
        self.assertEqual([row["shape"] for row in self.lines(result)[1:]], list(shapes))

    def test_packed_sequences_are_timed(self):
        result = kda("bench", "--suite", "prefill", "--shape", "1,48,1,2,32,32", "--lengths",
                     "16,0,31,1", "--repeat", "1", "--device", "cpu", "--json")
        self.check(result, 0)
        _, row = self.lines(result)
        self.assertEqual((row["sequences"], row["shape"]), (4, [1, 48, 1, 2, 32, 32]))

    def test_a_step_that_keeps_its_states_moves_them_too(self):
        moved = []
        for more in ((), ("--checkpoints",)):
            result = kda("bench", "--suite", "train", "--shape", "1,100,1,2,32,16", "--dtype",
                         "fp32", "--repeat", "1", "--device", "cpu", "--json", *more)
            self.check(result, 0)
            moved.append([row["bytes"] for row in self.lines(result)[1:]])
        h = 2 * 2 * 32 * 16 * 4  # two chunks, two heads
        self.assertEqual(moved[1], [bytes + h for bytes in moved[0]])
        result = kda("bench", "--suite", "decode", "--checkpoints", "--device", "cpu", "--json")
        self.check(result, 2)
        self.assertIn("decode", self.lines(result)[-1]["error"])

    def test_lengths_that_do_not_fit_are_named(self):
        for arguments, found in ((("--shape", "1,48,1,2,32,32", "--lengths", "16,31"), "sum is 47"),
                                 (("--shape", "2,48,1,2,32,32", "--lengths", "48"), "B = 2"),
                                 (("--shape", "1,4,1,1,32,32", "--lengths", "5,-1"),
                                  "--lengths: found -1, expected 0 or more"),
                                 (("--shape", "1,4,1,1,32,32", "--lengths", f"{2**63 - 1},5"),
                                  "--lengths: found a sum beyond 64 bits"),
                                 (("--lengths", "48"), "0 of --shape"),
                                 (("--shape", "1,48,1,2,32,32") * 2 + ("--lengths", "48"),
                                  "2 of --shape"),
                                 (("--suite", "decode", "--lengths", "48"), "decode")):
            with self.subTest(found):
                result = kda("bench", "--device", "cpu", "--json", *arguments)
                self.check(result, 2)
                (error,) = self.lines(result)
                self.assertIn(found, error["error"])

    def test_the_cost_of_a_call_is_a_matter_of_devices(self):
        result = kda("bench", "--suite", "host", "--repeat", "1", "--device", "cpu", "--json")
        self.check(result, 3)
        for row in self.lines(result)[1:]:
            self.assertEqual(row["kind"], "unsupported")
            self.assertIn("on the CPU the call is the computation", row["error"])

    def test_bytes_and_flop_of_a_shape_are_those_of_the_formulae(self):
        result = kda("bench", "--shape", "1,64,1,1,128,128", "--repeat", "1", "--device", "cpu",
                     "--json")
        self.check(result, 0)
        _, forward, backward = self.lines(result)
        # 1282 bytes a token: bf16 q, k, v, o, g, beta; then the fp32 state, A_log and dt_bias.
        self.assertEqual(forward["bytes"], 64 * 1282 + 4 * (128 * 128 + 1 + 128))
        self.assertEqual(forward["flop"], 64 * (6 * 128 * 128 + 10 * 64 * 128))
        self.assertEqual(backward["flop"],
                         64 * (16 * 128 * 128 + 24 * 64 * 128 + 4 * 64 * 64))

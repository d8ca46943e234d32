"""Sections of docs/python.md and docs/fla.md from the reports of the Python package, for
doc_tables.py."""

import json
import pathlib
from collections import Counter

RESULTS = pathlib.Path(__file__).resolve().parent.parent / "bench" / "results"


def origin(report: dict) -> str:
    """Where and when the figures of a report were taken."""
    versions = [
        f"{name} {report[name]}" for name in ("torch", "fla", "transformers") if report.get(name)
    ]
    return f"{report['machine']}; {', '.join(versions)}; {report['date'][:10]}\n\n"


def configurations(report: dict) -> str:
    """How fla's kernels were configured, where that was not left to its autotuner."""
    pinned = report.get("fla's pinned kernels", [])
    if pinned and len(pinned) < 4:
        names = ", ".join(f"`{name}`" for name in pinned)
        return (
            f"fla's kernels were autotuned, but for {names}, which both use and which had "
            "one configuration, pinned by `bench/python/pin_fla.py`.\n"
        )
    if not pinned and report.get("fla's configurations", "autotuned") == "autotuned":
        return "\nfla's kernels were autotuned.\n" if report.get("fla") else ""
    return (
        "fla's kernels were not autotuned: each had one configuration, pinned by "
        "`bench/python/pin_fla.py`.\n"
    )


def table(columns: list, rows: list) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def call_section(report: dict) -> str:
    """Time and memory of a call, native_kda / fla."""
    names = [name for name in ("native_kda", "fla") if name in report["rows"][0]]

    def cell(row: dict, form: str, *path: str) -> str:
        values = []
        for name in names:
            value = row[name]
            for key in path:
                value = value[key]
            values.append(format(value, form))
        return " / ".join(values)

    report["rows"].sort(key=lambda row: (row["gate"] != "softplus", row["shape"]))
    graph = all("graph_forward_and_backward_ms" in row["native_kda"] for row in report["rows"])
    rows = []
    for row in report["rows"]:
        for name in names:
            for kind in ("peak_bytes", "forward_peak_bytes"):
                row[name][kind] /= 1e9
        cells = [row["shape"], ", ".join(map(str, row["sizes"])), row["gate"]]
        cells.append(cell(row, ".2f", "forward_ms", "median"))
        cells.append(cell(row, ".2f", "forward_and_backward_ms", "median"))
        if graph:
            cells.append(f"{row['native_kda']['graph_forward_and_backward_ms']['median']:.2f}")
        cells.append(cell(row, ".2f", "forward_peak_bytes"))
        cells.append(cell(row, ".2f", "peak_bytes"))
        rows.append(cells)
    columns = ["", "B, T, H, HV, K, V", "gate", "forward, ms", "with backward, ms"]
    columns += ["with backward, in a CUDA graph (`native_kda`)"] if graph else []
    columns += ["memory of the forward, GB", "with backward, GB"]
    pairs = "In each cell native_kda / fla.\n\n" if len(names) > 1 else ""
    calls = ", ".join(f"`{name}`" for name in sorted(report["implementations"]))
    ran = f"\nRan here: {calls}.\n"
    return origin(report) + pairs + table(columns, rows) + ran + configurations(report)


def host_section(report: dict) -> str:
    """Host time of small calls."""
    names = ["forward_us", "forward_with_autograd_us", "step_us", "step_in_one_thread_us"]
    names.append("decode_us")
    rows = [
        [f"`{contender}`"] + [f"{host[name]:.0f}" if name in host else "" for name in names]
        for contender, host in report["host"].items()
    ]
    columns = ["microseconds", "forward, no_grad", "forward, gradients wanted"]
    columns += ["forward and backward", "in one thread", "decode with a pool"]
    return origin(report) + table(columns, rows)


def accuracy_section(report: dict) -> str:
    """Distance from float64, native_kda / fla, in thousandths."""
    outputs = ["o", "final_state", "dq", "dk", "dv", "dg", "dbeta", "dA_log", "ddt_bias"]
    outputs.append("dinitial_state")

    def cell(ratios: dict) -> str:
        return " / ".join("not finite" if x is None else f"{1e3 * x:.1f}" for x in ratios.values())

    rows = [
        [f"`{row['case']}`"] + [cell(row["ratios"].get(name, {})) for name in outputs]
        for row in report["rows"]
    ]
    calls = ", ".join(f"`{name}`" for name in sorted(report["implementations"]))
    ran = calls or f"the rows of `KDA_IMPL={report['KDA_IMPL']}`"
    return origin(report) + table(["case", *outputs], rows) + f"\nRan here: {ran}.\n"


def fla_tests_section(report: dict) -> str:
    """A row a test function of fla's test file."""
    groups: dict = {}
    for name, row in report["tests"].items():
        groups.setdefault(name.partition("[")[0], []).append(row)
    rows = []
    for name, cases in groups.items():
        implementations = Counter()
        for case in cases:
            implementations.update(case["implementations"])
        passed = sum(case["outcome"] == "passed" for case in cases)
        calls = ", ".join(f"`{n}` {k}" for n, k in sorted(implementations.items()))
        rows.append(
            [
                f"`{name}`",
                str(len(cases)),
                str(passed),
                str(sum(case["hits"] > 0 for case in cases)),
                calls,
            ]
        )
    text = origin(report) + table(["test", "cases", "passed", "with hits", "ran here"], rows)
    return text + (
        f"\n{report['meant and passed with hits']} of the {report['meant']} cases meant for this "
        "library passed with hits.\n"
    )


def kimi_linear_section(report: dict) -> str:
    other = report["without"]
    rows = [
        ["loss", f"{report['loss']:.6f}", f"{report['loss without']:.6f}"],
        [
            "norm of the gradient",
            f"{report['gradient norm']:.5f}",
            f"{report['gradient norm without']:.5f}",
        ],
    ]
    calls = ", ".join(f"`{n}` {k}" for n, k in sorted(report["implementations"].items()))
    return (
        origin(report)
        + table(["", "native_kda", other], rows)
        + (
            f"\nTokens generated alike: {report['tokens generated alike']:.0%}. "
            f"Ran here: {calls}.\n"
        )
        + configurations(report)
    )


def char_lm_section(report: dict) -> str:
    rows = [
        [
            f"`{run['kernels']}`",
            str(run["seed"]),
            f"{run['last loss']:.4f}",
            f"{run['tokens per second']:,}".replace(",", " "),
        ]
        for run in report["runs"]
    ]
    columns = ["kernels", "seed", "loss at the end", "tokens per second"]
    differences = ", ".join(
        f"{text} {report[name]:.5f}"
        for name, text in (
            ("kernels differ by", "native_kda and fla with one seed"),
            ("runs differ by", "two runs of fla with one seed"),
            ("seeds differ by", "fla with two seeds"),
        )
        if name in report
    )
    return (
        origin(report)
        + table(columns, rows)
        + (f"\nRoot mean square of the difference of two curves: {differences}.\n")
        + configurations(report)
    )


# By document: the sections, the report each is made from, and the command that writes it.
_SECTIONS = {
    "docs/python.md": [
        ("calls", call_section, "cuda_h200_python.json", "bench/python/call_speed.py"),
        ("host", host_section, "cuda_h200_python_host.json", "bench/python/call_speed.py"),
        (
            "accuracy",
            accuracy_section,
            "cuda_h200_python_accuracy.json",
            "bench/python/accuracy.py",
        ),
    ],
    "docs/fla.md": [
        ("fla tests", fla_tests_section, "cuda_h200_fla_tests.json", "bench/python/fla_plugin.py"),
        (
            "kimi linear",
            kimi_linear_section,
            "cuda_h200_kimi_linear.json",
            "examples/hf_kimi_linear.py",
        ),
        ("char lm", char_lm_section, "cuda_h200_char_lm.json", "examples/train_char_lm.py"),
    ],
}


def sections() -> dict:
    """By document, the text of each section. Where a report is absent it says so."""
    documents: dict = {}
    for document, rows in _SECTIONS.items():
        for name, section, report, script in rows:
            path = RESULTS / report
            text = f"Not measured yet: `{script}` writes `bench/results/{report}`.\n"
            if path.exists():
                text = section(json.loads(path.read_text()))
            documents.setdefault(document, {})[name] = text
    return documents

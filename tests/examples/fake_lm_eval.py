"""A fake lm_eval: asks every question of our task, and writes files like lm_eval's.

Imports only fast modules.
"""

import argparse
import json
import sys
from pathlib import Path
from urllib.request import Request, urlopen

from examples.accuracy.language import HOPS

DATE = "2026-01-01T00-00-00.000001"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run")
    for name in ("--model", "--model_args", "--tasks", "--include_path", "--output_path"):
        parser.add_argument(name)
    parser.add_argument("--log_samples", action="store_true")
    arguments = parser.parse_args()
    options = dict(option.split("=", 1) for option in arguments.model_args.split(","))
    questions = [
        json.loads(line) for line in Path("key_value_recall.jsonl").read_text().splitlines()
    ]
    samples = []
    for number, question in enumerate(questions):
        body = json.dumps({"prompt": question["prompt"], "max_tokens": HOPS}).encode()
        with urlopen(Request(options["base_url"], body)) as response:
            answer = json.load(response)["choices"][0]["text"]
        samples.append({"doc_id": number, "target": question["answer"], "resps": [[answer]]})
        sys.stderr.write(f"\rRequesting API: |{number + 1}/{len(questions)} [00:01]")
    share = sum(each["resps"] == [[each["target"]]] for each in samples) / len(samples)
    output = Path(arguments.output_path) / "model"
    output.mkdir(parents=True)
    scores = {"alias": arguments.tasks, "exact_match,words": share}
    scores["exact_match_stderr,words"] = 0.0 if len(samples) > 1 else "N/A"
    results = {"results": {arguments.tasks: scores}}
    (output / f"results_{DATE}.json").write_text(json.dumps(results))
    lines = "".join(json.dumps(each) + "\n" for each in samples)
    (output / f"samples_{arguments.tasks}_{DATE}.jsonl").write_text(lines)


if __name__ == "__main__":
    main()

"""A conversion in 8 parts on a Ray cluster of three workers: `parts_on_ray.py [GIGABYTES]`.

Generates a checkpoint (4 GB unless told otherwise), and converts it in one process. Then every part
is started in random order and killed once, when it has written a random share of its bytes; two are
made, and made again later; `--finish` is refused; and `nvfp4.ray.convert` does the rest, while one
worker is killed. The bytes must be those of one process.
"""

import json
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import numpy as np
import ray
import ray.cluster_utils

import nvfp4.ray

PARTS = 8


def generate(folder, hidden, layers):
    """A Llama in BF16, a file for each layer."""
    rng, index = np.random.default_rng(20), {}
    values = (rng.standard_normal(1 << 20).astype(np.float32) * 0.02).view(np.uint32) >> 16
    values = values.astype(np.uint16)  # BF16, rounded to zero
    wide = hidden * 11 // 4 // 16 * 16
    shapes = {f"self_attn.{x}_proj": (hidden, hidden) for x in "qkvo"}
    shapes |= {"mlp.gate_proj": (wide, hidden), "mlp.up_proj": (wide, hidden)}
    shapes |= {"mlp.down_proj": (hidden, wide)}
    folder.mkdir()
    for layer in range(layers):
        file, header, at = f"model-{layer + 1:05}-of-{layers:05}.safetensors", {}, 0
        for name, shape in shapes.items():
            size = 2 * shape[0] * shape[1]
            name = f"model.layers.{layer}.{name}.weight"
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
            at, index[name] = at + size, file
        text = json.dumps(header).encode()
        with open(folder / file, "wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for turn, shape in enumerate(shapes.values()):
                turned = np.roll(values, 4099 * (7 * layer + turn))
                out.write(np.resize(turned, shape[0] * shape[1]).tobytes())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "tokenizer.json").write_text("{}")
    config = {"architectures": ["LlamaForCausalLM"], "hidden_size": hidden}
    (folder / "config.json").write_text(json.dumps(config))


def command(*words):
    return [sys.executable, "-m", "nvfp4", *map(str, words)]


def run(*words):
    return subprocess.run(command(*words), capture_output=True, text=True)


def timed(what, *words):
    start = time.monotonic()
    done = run(*words)
    assert done.returncode == 0, done.stderr
    print(f"{what}: {time.monotonic() - start:.1f} s", flush=True)


@ray.remote
def killed(words, folder, part, share):
    """Starts a part, and kills it when it has written so many bytes; whether it still ran."""
    process = subprocess.Popen(command(*words, "-q", "--part", part))
    name = f"part-{part.replace('/', '-of-')}-"

    def written():
        files = [file for own in pathlib.Path(folder).glob(f"{name}*") for file in own.glob("*")]
        try:
            return sum(512 * file.stat().st_blocks for file in files)
        except FileNotFoundError:
            return 0

    while process.poll() is None and written() < share:
        time.sleep(0.005)
    process.kill()
    return process.wait() == -signal.SIGKILL


def contents(folder):
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def convert_in_parts(folder, hidden, layers, options=(), seed=20):
    """Returns how many parts were killed, and the lines about the progress."""
    chance = random.Random(seed)
    source, alone, target = folder / "in", folder / "alone", folder / "out"
    generate(source, hidden, layers)
    words = ["convert", source, target, *options]
    timed("one process", "convert", source, alone, *options, "-q")
    plan = json.loads(run("plan", source, "--parts", PARTS, *options, "--json").stdout)["parts"]

    cluster = ray.cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    small = {"num_cpus": 1, "object_store_memory": 80 << 20}
    workers = [cluster.add_node(**small) for _ in range(3)]
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        cluster.wait_for_nodes()
        order, parts = chance.sample(range(PARTS), PARTS), folder / "out.parts"
        # Less than a file, since files that are done are not counted.
        files = [max(1, part["files"] + part["divided"]) for part in plan]
        most = [0.8 * part["new_bytes"] / count for part, count in zip(plan, files)]
        shares = [chance.uniform(0, share) for share in most]
        tasks = [killed.remote(words, parts, f"{part}/{PARTS}", shares[part]) for part in order]
        ended = ray.get(tasks)
        kills = sum(ended)
        print(f"killed {kills} of {PARTS} parts", flush=True)
        made = chance.sample(range(PARTS), 2)
        for part in made:
            part = f"{part}/{PARTS}"
            timed(f"part {part}, which will be made again", *words, "-q", "--part", part)
        refused = run(*words, "--finish")
        assert refused.returncode != 0 and "missing or not complete" in refused.stderr, refused.stderr
        named = {int(part) for part in re.findall(rf"(\d+)/{PARTS}\b", refused.stderr)}
        # A small part may have come to its end before it was killed.
        unmade = {part for part, was_killed in zip(order, ended) if was_killed} - set(made)
        assert named and named <= unmade, f"{refused.stderr}: not made are {unmade}"
        assert not target.exists()
        lines = []

        def say(line):
            print(line, flush=True)
            lines.append(line)
            if len(lines) == 1:  # a worker that does not rest after its part
                busy = next(node for node in workers if not line.endswith(node.node_id[:8]))
                cluster.remove_node(busy, allow_graceful=False)
                print("a worker is killed", flush=True)

        start = time.monotonic()
        assert nvfp4.ray.convert(source, target, *map(str, options), parts=PARTS, cpus=1, say=say)
        print(f"on Ray: {time.monotonic() - start:.1f} s", flush=True)
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert contents(target) == contents(alone), "not the bytes of one process"
    assert not parts.exists() and not (folder / "out.partial").exists()
    return kills, lines


def main():
    gigabytes = float(sys.argv[1]) if len(sys.argv) > 1 else 4.0
    layers = max(1, round(gigabytes * 1e9 / (2 * (4 + 3 * 2.75) * 4096**2)))
    folder = pathlib.Path(tempfile.mkdtemp(prefix="nvfp4-ray-"))
    try:
        kills, lines = convert_in_parts(folder, 4096, layers, ("--max-shard", "125MB"))
        assert kills == PARTS, f"only {kills} parts were killed"
        assert any("starts again" in line for line in lines), "nothing was lost with the worker"
        print("the bytes are those of one process")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()

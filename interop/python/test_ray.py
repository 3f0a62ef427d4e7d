"""`nvfp4.ray` on a local cluster of three workers, with small sizes; `parts_on_ray.py` does it with
large ones. Ray missing here is a failure: `peers.txt` has it."""

import os
import subprocess
import sys

import pytest
import ray

import nvfp4.ray
from parts_on_ray import PARTS, contents, convert_in_parts, generate


def test_parts_are_killed_and_a_worker_is_lost(tmp_path):
    """In one file, which is divided between the parts."""
    _, lines = convert_in_parts(tmp_path, 256, 4)
    assert sum(" done in " in line for line in lines) == PARTS + 1


@pytest.fixture(scope="class")
def cluster():
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.usefixtures("cluster")
class TestOneNode:
    def test_the_command_line_passes_options_on(self, tmp_path):
        generate(tmp_path / "in", 64, 1)

        def words(target):
            return ["convert", tmp_path / "in", tmp_path / target, "--to", "compressed-tensors"]

        subprocess.run([sys.executable, "-m", "nvfp4", *words("alone"), "-q"], check=True)
        address = ray.get_runtime_context().gcs_address
        page = ["--report", str(tmp_path / "page.html"), "--parts", "2"]
        launch = [sys.executable, "-m", "nvfp4.ray", *words("out"), "--address", address, *page]
        done = subprocess.run(launch, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "2/2 part " in done.stdout and "finish done in" in done.stdout
        assert contents(tmp_path / "out") == contents(tmp_path / "alone")
        assert os.path.exists(tmp_path / "page.html")

    def test_an_error_is_what_the_command_says(self, tmp_path):
        generate(tmp_path / "in", 64, 1)
        with pytest.raises(RuntimeError, match="part 0/1 failed 2 times: .*matches no weight"):
            nvfp4.ray.convert(
                tmp_path / "in", tmp_path / "out", "--skip", "absent", parts=1, retries=1
            )
        with pytest.raises(RuntimeError, match="failed 1 times: .*unexpected argument"):
            nvfp4.ray.convert(tmp_path / "in", tmp_path / "out", "--frobnicate", parts=1)

    def test_what_the_cluster_has_not_is_refused(self, tmp_path, monkeypatch):
        with pytest.raises(ValueError, match="cpus: expected at most 2, as the largest node has, got 3"):
            nvfp4.ray.convert(tmp_path / "in", tmp_path / "out", cpus=3)
        monkeypatch.setattr(nvfp4.ray, "_nodes", dict)
        with pytest.raises(ValueError, match="no node with a whole CPU"):
            nvfp4.ray.convert(tmp_path / "in", tmp_path / "out")

    @pytest.mark.parametrize("words", [["--threads", "2"], ["--threads=2"]])
    def test_threads_are_those_of_the_options(self, tmp_path, monkeypatch, words):
        given = []

        def all_of(jobs, *_):
            given.extend(jobs.values())
            return nvfp4.ray._Result(0, "", "", 0.0)

        monkeypatch.setattr(nvfp4.ray, "_all", all_of)
        assert nvfp4.ray.convert(tmp_path / "in", tmp_path / "out", *words, parts=1)
        assert len(given) == 2 and all(sum("--threads" in word for word in job) == 1 for job in given)

    def test_an_exception_cancels_all_parts(self, tmp_path):
        generate(tmp_path / "in", 64, 1)

        def stop(line):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            nvfp4.ray.convert(tmp_path / "in", tmp_path / "out", parts=8, cpus=1, say=stop)
        assert not (tmp_path / "out").exists()
        assert nvfp4.ray.convert(tmp_path / "in", tmp_path / "out", parts=8, say=lambda line: None)

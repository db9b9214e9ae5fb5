"""What starts `ssd-jax serve`: the image, Compose, systemd, and the command on Kubernetes."""

import configparser
import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

from ssd_jax.cli import draft_worker, serve, settings
from ssd_jax.wire.address import Address
from ssd_jax.wire.security import WORKER_SETTINGS, Files
from tests.checkpoints import tiny_pair
from tests.launch.test_scripts import FLAGS, LAUNCH, ON_GPUS, dry, run
from tests.placement.hosts.processes import free_port
from tests.server.scripted import ScriptedEngine, served
from tests.test_public_names import flags_of
from tests.waiting import eventually

SERVE = LAUNCH / "serve"
ON_ONE = [flag for flag in FLAGS["gke/run.sh"] if not flag.startswith("--hosts")] + ["--hosts=1"]
COMMAND = ["serve", "--target=hf:o/t", "--mode=ssd", "--slots=8"]


def dockerfile():
    """The instructions, each with what follows it."""
    text = re.sub(r"\\\n", " ", (SERVE / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [tuple(line.split(maxsplit=1)) for line in lines]


def test_the_image_has_what_it_copies_and_runs_as_nobody_in_particular():
    found = dockerfile()
    names = [name for name, _ in found]
    assert names[0] == "FROM"
    assert names[-2:] == ["ENTRYPOINT", "CMD"]
    for name, rest in found:
        if name == "COPY":
            assert all((LAUNCH.parent / source).exists() for source in rest.split()[:-1])
    assert ("USER", "10001") in found
    assert ("STOPSIGNAL", "SIGTERM") in found
    command = json.loads(found[-1][1])
    assert {flag_name(word) for word in command[1:]} <= {*flags_of(command[0])}


@pytest.mark.parametrize(
    ("extra", "installed"),
    [("cpu", ".[serve]"), ("cuda", ".[serve,cuda]"), ("tpu", ".[serve,tpu]")],
)
def test_the_image_is_for_processors_gpus_or_tpus(extra, installed):
    (install,) = [rest for name, rest in dockerfile() if name == "RUN" and "pip install" in rest]
    script = f'pip() {{ echo "${{@: -1}}"; }}\n{install}'
    for value, expected in ((extra, (0, installed)), ("gpu", (2, ""))):
        ran = subprocess.run(
            ["bash", "-c", script],
            env={**os.environ, "EXTRA": value},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (ran.returncode, ran.stdout.strip()) == expected, ran.stderr


def flag_name(word):
    return word.removeprefix("--").partition("=")[0]


def value_of(words, name):
    (found,) = [word.partition("=")[2] for word in words if word.startswith(f"--{name}=")]
    return found


def compose(file="compose.yaml", **variables):
    """A file of Compose, with variables put in as Compose does."""
    yaml = pytest.importorskip("yaml")

    def filled(match):
        name, default = match[1], match[2]
        return variables.get(name, "" if default is None else default)

    text = re.sub(r"\$\{(\w+)(?::[-?]([^}]*))?\}", filled, (SERVE / file).read_text())
    return yaml.safe_load(text)


@pytest.fixture
def secrets(tmp_path):
    """What the first lines of the file make."""
    made = run("secrets.sh", str(tmp_path / "secrets"), "draft")
    assert made.returncode == 0, made.stderr
    keys = tmp_path / "secrets" / "keys"
    keys.write_text("key-0123456789abcdef\n")
    keys.chmod(0o600)
    return tmp_path / "secrets"


def test_the_services_of_compose_fit_together(secrets):
    services = compose()["services"]
    assert {*services} == {"server", "draft"}
    commands = {
        name: [word.replace("/secrets/", f"{secrets}/") for word in service["command"]]
        for name, service in services.items()
    }
    flags = settings.new_flags(serve._FLAGS, **serve._DEFAULTS)
    server = settings.parse(flags, "serve", commands["server"][1:])
    config = settings.config_of(server)
    assert config.draft_placement == "remote:draft:4711"
    options = serve._server_options(server, config.target)
    assert options.keys == ("key-0123456789abcdef",)
    flags = settings.make_flags(draft_worker._FLAGS)
    worker = settings.parse(flags, "draft-worker", commands["draft"][1:])
    files = Files(*(worker[name] for name in WORKER_SETTINGS))
    files.check(Address.parse(worker["listen"], "listen"), serves=True)
    assert files.read_token("token_file")
    assert files.serving_context() is not None
    assert (worker["draft"], worker["target"]) == (config.draft, config.target)


def test_compose_drains_before_it_kills_and_starts_the_worker_again():
    services = compose()["services"]
    assert int(services["server"]["stop_grace_period"].removesuffix("s")) > int(
        value_of(services["server"]["command"], "drain_seconds")
    )
    assert services["draft"]["restart"] == "unless-stopped"
    assert services["server"]["healthcheck"]["test"][0] == "CMD"
    assert services["server"]["ports"] == ["127.0.0.1:8000:8000"], "not for others by default"
    assert (LAUNCH.parent / services["draft"]["build"]["dockerfile"]).exists()


def test_compose_takes_target_and_draft_from_variables():
    services = compose(TARGET="hf:o/t", DRAFT="hf:o/d", EXTRA="cuda", SSD_USER="7:7")["services"]
    for service in services.values():
        assert value_of(service["command"], "target") == "hf:o/t"
        assert value_of(service["command"], "draft") == "hf:o/d"
        assert (service["user"], service["build"]["args"]) == ("7:7", {"EXTRA": "cuda"})


def test_each_service_has_a_gpu_of_its_own():
    found = compose("compose.cuda.yaml")["services"]
    assert {*found} == {*compose()["services"]}
    devices = [
        service["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"]
        for service in found.values()
    ]
    assert devices == [["0"], ["1"]]


def has_compose():
    version = ["docker", "compose", "version"]
    return shutil.which("docker") and not subprocess.run(version, capture_output=True).returncode


@pytest.mark.skipif(not has_compose(), reason="there is no docker compose")
@pytest.mark.parametrize("files", [["compose.yaml"], ["compose.yaml", "compose.cuda.yaml"]])
def test_compose_takes_the_files_and_asks_for_the_owner_of_the_secrets(files):
    names = [word for file in files for word in ("-f", str(SERVE / file))]
    for more, status in (({"SSD_USER": "1:1"}, 0), ({}, 1)):
        environment = {name: text for name, text in os.environ.items() if name != "SSD_USER"}
        ran = subprocess.run(
            ["docker", "compose", *names, "config", "--quiet"],
            env=environment | more,
            capture_output=True,
            text=True,
            check=False,
        )
        assert bool(ran.returncode) == bool(status), ran.stderr
    assert "give SSD_USER=$(id -u):$(id -g)" in ran.stderr


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="there is no hadolint")
@pytest.mark.parametrize("folder", ["serve", "gke"])
def test_a_linter_finds_nothing_wrong_with_the_images(folder):
    """But for versions, which are left open: those of Debian's packages, and of Python's."""
    left_open = ["--ignore=DL3008", "--ignore=DL3013"]
    file = str(LAUNCH / folder / "Dockerfile")
    ran = subprocess.run(
        ["hadolint", *left_open, file], capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stdout) == (0, "")


def unit():
    parser = configparser.RawConfigParser()
    parser.optionxform = str
    parser.read(SERVE / "ssd-jax.service")
    return parser


def test_systemd_drains_restarts_failures_and_leaves_bad_settings():
    service = unit()["Service"]
    command = shlex.split(service["ExecStart"])
    assert {flag_name(word) for word in command[2:]} <= {*flags_of(command[1])}
    assert int(service["TimeoutStopSec"]) > int(value_of(command, "drain_seconds"))
    assert "KillSignal" not in service, "SIGTERM is the default"
    assert (service["Restart"], service["RestartPreventExitStatus"]) == ("on-failure", "2")
    credential = service["LoadCredential"].partition(":")[0]
    assert value_of(command, "api_key_file") == f"%d/{credential}"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path):
    program = tmp_path / "ssd-jax"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    copy = tmp_path / "ssd-jax.service"
    text = (SERVE / "ssd-jax.service").read_text()
    copy.write_text(text.replace("/opt/ssd-jax/bin/ssd-jax", str(program)))
    checked = subprocess.run(
        ["systemd-analyze", "verify", copy], capture_output=True, text=True, check=False
    )
    assert (checked.returncode, checked.stderr) == (0, "")


def manifests(*flags, command=COMMAND):
    yaml = pytest.importorskip("yaml")
    return [*yaml.safe_load_all(dry("gke/run.sh", *flags, *command))]


def leader(manifest):
    """The pod of the target, and its container."""
    target = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = target["template"]["spec"]
    return pod, pod["containers"][0]


@pytest.mark.parametrize("flags", [ON_ONE, FLAGS["gke/run.sh"], ON_GPUS])
def test_kubernetes_takes_the_server_with_its_probes_and_its_service(flags):
    validate = pytest.importorskip("kubernetes_validate")
    jobs, service = manifests(*flags, "--api_keys=k")
    validate.validate(service, "1.33", strict=True)
    for job in jobs["spec"]["replicatedJobs"]:
        made = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}}
        validate.validate(made | {"spec": job["template"]["spec"]}, "1.33", strict=True)


def test_the_service_leads_to_the_leader():
    jobs, service = manifests(*FLAGS["gke/run.sh"])
    assert service["metadata"]["name"] == "ssd-server"
    assert service["spec"]["selector"] == {
        "jobset.sigs.k8s.io/jobset-name": jobs["metadata"]["name"],
        "jobset.sigs.k8s.io/replicatedjob-name": jobs["spec"]["replicatedJobs"][0]["name"],
        "batch.kubernetes.io/job-completion-index": "0",
    }
    (port,) = service["spec"]["ports"]
    assert port["targetPort"] == leader(jobs)[1]["ports"][0]["containerPort"] == 8000


def test_a_server_is_started_again_and_has_time_to_drain():
    jobs, _ = manifests(*FLAGS["gke/run.sh"], command=[*COMMAND, "--drain_seconds=100"])
    pod, container = leader(jobs)
    assert pod["terminationGracePeriodSeconds"] > 100
    assert jobs["spec"]["failurePolicy"]["maxRestarts"] > 1000
    assert "--host=0.0.0.0" in container["command"]
    assert all("livenessProbe" not in job for job in jobs["spec"]["replicatedJobs"][1:])


def test_one_host_is_probed_by_http_and_of_several_the_leader_alone():
    jobs, _ = manifests(*ON_ONE, command=[*COMMAND, "--port=9000", "--ssl_certfile=/c"])
    probes = leader(jobs)[1]
    paths = {"startupProbe": "/health/live", "readinessProbe": "/health/ready"}
    for name, path in {**paths, "livenessProbe": "/health/live"}.items():
        assert probes[name]["httpGet"] == {"path": path, "port": 9000, "scheme": "HTTPS"}
    jobs, _ = manifests(*FLAGS["gke/run.sh"])
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        command = leader(jobs)[1][name]["exec"]["command"]
        environment = {**os.environ, "JOB_COMPLETION_INDEX": "1"}
        assert subprocess.run(command, env=environment, check=False).returncode == 0


def test_a_probe_of_the_leader_asks_its_server():
    with served(ScriptedEngine()) as server:
        jobs, _ = manifests(*FLAGS["gke/run.sh"], command=[*COMMAND, f"--port={server.port}"])
        command = leader(jobs)[1]["readinessProbe"]["exec"]["command"]
        environment = {**os.environ, "JOB_COMPLETION_INDEX": "0"}
        for loaded, status in ((True, 0), (False, 1)):
            server.state.loaded = loaded
            ran = subprocess.run(command, env=environment, capture_output=True, check=False)
            assert ran.returncode == status


def test_keys_are_mounted_for_the_server_alone():
    jobs, _ = manifests(*FLAGS["gke/run.sh"], "--api_keys=k")
    pod, container = leader(jobs)
    assert "--api_key_file=/keys/keys" in container["command"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["keys"]["secret"] == {"secretName": "k", "defaultMode": 0o400}
    draft = jobs["spec"]["replicatedJobs"][1]["template"]["spec"]["template"]["spec"]
    assert [volume["name"] for volume in draft["volumes"]] == ["secrets"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--api_keys=k", "generate"], "--api_keys is of the command serve"),
        (["serve", "--port=0"], "serve --port=0 is no number from 1 on"),
        (["serve", "--drain_seconds=x"], "serve --drain_seconds=x is no number from 0 on"),
    ],
)
def test_what_no_server_has_is_refused(flags, message):
    found = run("gke/run.sh", "--dry_run", *FLAGS["gke/run.sh"], *flags)
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr == f"launch/gke/run.sh: {message}; see --help\n"


def ask(port, path, body=None):
    """JSON of a response."""
    headers = {"Authorization": "Bearer key-0123456789abcdef"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


@contextlib.contextmanager
def process(words, environment):
    started = subprocess.Popen([sys.executable, "-m", "ssd_jax", *words], env=environment)
    try:
        yield started
    finally:
        started.kill()
        started.wait()


@pytest.mark.more
def test_a_draft_worker_that_dies_costs_no_request_and_the_server_says_so(secrets, tmp_path):
    """The commands of Compose, on this machine."""
    target, draft = tiny_pair.write(tmp_path, "qwen3")
    assert run("secrets.sh", str(secrets), "localhost").returncode == 0
    port, worker_port = free_port(), free_port()
    more = ["--compile_cache=off", f"--port={port}", "--served_model_name=m", "--dtype=float32"]
    commands = {
        name: [
            word.replace("/secrets/", f"{secrets}/")
            .replace("draft:4711", f"localhost:{worker_port}")
            .replace("0.0.0.0:4711", f"127.0.0.1:{worker_port}")
            .replace("0.0.0.0", "127.0.0.1")
            for word in service["command"]
        ]
        for name, service in compose(TARGET=target, DRAFT=draft, SLOTS="2", CONTEXT="256")[
            "services"
        ].items()
    }
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    body = {"model": "m", "prompt": "to be", "max_tokens": 60, "ignore_eos": True, "seed": 1}

    def ready():
        with contextlib.suppress(OSError, urllib.error.HTTPError):
            return ask(port, "/health/ready")["status"] == "ready"
        return False

    with (
        process([*commands["draft"], "--compile_cache=off"], environment) as worker,
        process([*commands["server"], *more], environment) as server,
    ):
        eventually(ready)
        first = ask(port, "/v1/completions", body)
        assert first["metrics"]["speculating"]
        assert ask(port, "/status.json")["speculating"]
        worker.kill()
        worker.wait()
        second = ask(port, "/v1/completions", body)
        assert second["choices"] == first["choices"]
        third = ask(port, "/v1/completions", body)
        assert third["choices"] == first["choices"]
        assert third["metrics"]["reason"] == "the draft worker is out of reach"
        assert ask(port, "/status.json")["why_not_speculating"] == third["metrics"]["reason"]
        server.terminate()
        assert server.wait(300) == 0

"""Launch scripts: what they would run, and that clusters would take it."""

from __future__ import annotations

import fcntl
import functools
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import termios
from pathlib import Path

import pytest

from tests.waiting import eventually

LAUNCH = Path(__file__).parents[2] / "launch"
SCRIPTS = sorted(path.relative_to(LAUNCH).as_posix() for path in LAUNCH.rglob("*.sh"))
COMMAND = ["generate", "--target=hf:o/t", "--mode=ssd", '--prompt=say "a b" $HOME']
GKE = ["--image=i", "--hosts=2", "--accelerator=a", "--chips=4"]
FLAGS = {
    "slurm/run.sh": [
        *("--nodes=2", "--draft=hf:o/d", "--draft_devices=0-3", "--sbatch=--partition=gpu"),
    ],
    "tpu_vm/run.sh": [
        *("--tpu=t", "--hosts=2", "--zone=z", "--draft=hf:o/d", "--draft_tpu=u"),
        *("--draft_address=10.0.0.7", "--draft_devices=0-3"),
    ],
    "gke/run.sh": [
        *("--image=i:1", "--hosts=4", "--accelerator=tpu-v6e-slice", "--chips=4"),
        *("--topology=4x4", "--draft=hf:o/d", "--draft_devices=0-3"),
    ],
    "local.sh": ["--processes=2", "--draft=hf:o/d", "--draft_devices=0-3", "--port=4000"],
}
ON_A_VOLUME = [
    *("--hf_token=hf", "--volume=claim", "--answers=/data/a b.jsonl"),
    "--compile_cache_secret=hmac",
]
STORE = ["--compile_cache=/data/programs", "--compile_cache_secret=/programs/secret"]
ON_A_BUCKET = ["--bucket=b", "--service_account=reader"]
ON_GPUS = [
    *("--image=i:1", "--hosts=2", "--accelerator=nvidia-h100-80gb", "--chips=8", "--draft=hf:o/d"),
    *("--draft_accelerator=nvidia-l4", "--draft_chips=1"),
]


def run(script, *arguments):
    return subprocess.run(
        [LAUNCH / script, *arguments], capture_output=True, text=True, timeout=300, check=False
    )


def dry(script, *arguments):
    found = run(script, "--dry_run", *arguments)
    assert found.returncode == 0, found.stderr
    return found.stdout


def stand_ins(directory, monkeypatch, **texts):
    """Programs on PATH, in bash; - in their names is _ here."""
    for name, text in texts.items():
        program = directory / name.replace("_", "-")
        program.write_text(f"#!/bin/bash\n{text}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")


def test_a_job_of_slurm_is_a_copy_of_its_script(tmp_path, monkeypatch):
    """As sbatch makes one in a directory of its own, and runs that."""
    copy = tmp_path / "spool" / "slurm_script"
    copy.parent.mkdir()
    run_copy = f'cp "$1" {copy}; shift; SLURM_JOB_ID=7 exec bash {copy} "$@"'
    stand_ins(
        tmp_path,
        monkeypatch,
        sbatch=f"while [[ $1 == --* ]]; do shift; done; {run_copy}",
        srun='printf "%s\\n" srun "$@"',
    )
    words = run("slurm/run.sh", "--nodes=2", *COMMAND).stdout.splitlines()
    assert words[0] == "srun"
    assert words[-len(COMMAND) - 1 :] == [str(LAUNCH / "host.sh"), *COMMAND]


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_have_help_and_refuse_unknown_flags(script):
    assert run(script, "--help").stdout.startswith(f"usage: launch/{script} [--dry_run]")
    assert "--help" in run(script, "--nonsense").stderr
    assert run(script, "--nonsense").returncode == 2
    assert run(script).returncode == 2


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        ("slurm/run.sh", ["generate"], "--nodes is missing"),
        ("slurm/run.sh", ["--nodes=0", "generate"], "--nodes=0 is no number from 1 on"),
        ("slurm/run.sh", ["--nodes=2"], "COMMAND is missing"),
        ("local.sh", ["--processes=abc", "generate"], "--processes=abc is no number from 1 on"),
        ("gke/run.sh", ["--image=i", "generate"], "--hosts is missing"),
        ("tpu_vm/run.sh", ["--tpu=t", "generate"], "--hosts is missing"),
        (
            "tpu_vm/run.sh",
            ["--tpu=t", "--hosts=2", "--zone=z", "--draft=d", "generate"],
            "--draft_tpu is missing",
        ),
        ("host.sh", ["x", "auto", "generate"], "INDEX = x is no number"),
        ("host.sh", ["08", "auto", "generate"], "INDEX = 08 is no number"),
        ("local.sh", ["--port=65535", "generate"], "--port=65535 is no port: 1 to 65534"),
        (
            "gke/run.sh",
            [*GKE, "--name=12", "generate"],
            "--name=12 is no name of Kubernetes: small letters, digits and -, such as ssd",
        ),
        (
            "gke/run.sh",
            [*GKE, "--volume=v", "--bucket=b", "generate"],
            "--volume and --bucket would both be /data; give one of them",
        ),
        (
            "gke/run.sh",
            [*GKE, "--volume=v", "--service_account=s", "generate"],
            "--service_account is who uses a bucket; give --bucket",
        ),
        (
            "gke/run.sh",
            [*GKE, "--answers=/data/a", "generate"],
            "--answers=/data/a would end with its pod; give --volume or --bucket, or read the "
            "pod's log",
        ),
        (
            "gke/run.sh",
            [*GKE, "--compile_cache_secret=s", "generate"],
            "--compile_cache_secret is of programs that pods share; give --volume or --bucket",
        ),
        (
            "gke/run.sh",
            [*GKE, "--bucket=b", "--answers=/tmp/a", "generate"],
            "--answers=/tmp/a is no file under /data",
        ),
        ("secrets.sh", ["here"], "DIRECTORY and HOST are needed"),
        ("secrets.sh", ["here", ""], "HOST = '' is no name or number of a host"),
        ("secrets.sh", ["here", "a,DNS:b"], "HOST = 'a,DNS:b' is no name or number of a host"),
    ],
)
def test_bad_flags_of_scripts_are_named_in_one_line(script, arguments, message):
    found = run(script, "--dry_run", *arguments)
    assert found.returncode == 2
    assert found.stderr == f"launch/{script}: {message}; see --help\n"


@pytest.mark.parametrize(
    ("script", "flags", "program"),
    [
        ("slurm/run.sh", ["--nodes=2"], "sbatch"),
        ("gke/run.sh", GKE, "kubectl"),
        ("tpu_vm/run.sh", ["--tpu=t", "--hosts=2", "--zone=z"], "gcloud"),
    ],
)
def test_a_missing_client_of_the_cluster_is_said_in_one_line(script, flags, program, tmp_path):
    for needed in ("bash", "dirname"):
        (tmp_path / needed).symlink_to(shutil.which(needed))
    found = subprocess.run(
        [tmp_path / "bash", LAUNCH / script, *flags, *COMMAND],
        env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert found.returncode == 2
    assert found.stderr.startswith(f"launch/{script}: {program} is not on PATH: ")
    assert found.stderr.count("\n") == 1


NEEDED = {
    "--nodes",
    "--processes",
    "--tpu",
    "--hosts",
    "--zone",
    "--image",
    "--accelerator",
    "--chips",
}


def of_target(script):
    """The flags that a script does not do without."""
    return [flag for flag in FLAGS[script] if flag.partition("=")[0] in NEEDED]


@pytest.mark.parametrize("script", FLAGS)
@pytest.mark.parametrize(
    ("flag", "command", "message"),
    [
        ("--port=abc", COMMAND, "--port=abc is no number from 1 on"),
        ("--port=99999", COMMAND, "--port=99999 is no port: 1 to 6553"),
        ("--draft_devices=0-3", COMMAND, "--draft_devices is of a draft; give --draft"),
        (
            "--draft=d",
            ["generate", "--config=f"],
            "a draft worker reads no --config; give --target",
        ),
    ],
)
def test_every_script_refuses_what_it_could_not_use(script, flag, command, message):
    flags = ["--draft_tpu=u", "--draft_address=a"] if "tpu" in script and "draft=" in flag else []
    found = run(script, "--dry_run", *of_target(script), flag, *flags, *command)
    assert found.returncode == 2
    assert found.stderr.startswith(f"launch/{script}: {message}")
    assert found.stdout == ""


@pytest.mark.parametrize("script", FLAGS)
def test_a_worker_is_told_the_target_however_it_is_given(script):
    flags = ["--config=f", "--target", "hf:o/t"]
    assert "--target=hf:o/t" in dry(script, *FLAGS[script], "generate", *flags)


def commands(text):
    """Every ssd-jax command and host's part in what a script prints, as words."""
    found = []
    for line in text.splitlines():
        words = shlex.split(line)
        if words[:1] == ["gcloud"]:
            inside = [word for word in words if word.startswith("--command=")]
            words = shlex.split(inside[0].partition("&& ")[2]) if inside else []
        for place, word in enumerate(words):
            if word == "ssd-jax" or word.endswith("host.sh"):
                found.append(words[place:])
                break
    return found


def test_hosts_run_the_leaders_command_or_follow():
    leader = commands(dry("host.sh", "0", "10.0.0.1:4000,count=3", *COMMAND))
    assert leader == [["ssd-jax", *COMMAND, "--hosts=10.0.0.1:4000,count=3"]]
    follower = commands(dry("host.sh", "2", "10.0.0.1:4000,count=3", *COMMAND))
    assert follower == [["ssd-jax", "follower", "--hosts=10.0.0.1:4000,count=3,index=2"]]
    for index, beginning in (("0", COMMAND[:1]), ("1", ["follower"])):
        (words,) = commands(dry("host.sh", *STORE, index, "auto", *COMMAND))
        assert words[: 2 + len(STORE)] == ["ssd-jax", *beginning, *STORE]
    assert commands(dry("host.sh", "2", "auto", *COMMAND)) == [
        ["ssd-jax", "follower", "--hosts=auto"]
    ]


def test_local_processes_are_two_of_the_target_and_a_worker():
    worker, follower, leader = commands(dry("local.sh", *FLAGS["local.sh"], *COMMAND))
    assert worker[:2] == ["ssd-jax", "draft-worker"]
    assert {*worker[2:]} == {
        *("--listen=127.0.0.1:4001", "--draft=hf:o/d", "--target=hf:o/t", "--draft_devices=0-3")
    }
    assert follower == ["ssd-jax", "follower", "--hosts=127.0.0.1:4000,count=2,index=1"]
    flags = ["--draft=hf:o/d", "--draft_placement=remote:127.0.0.1:4001"]
    assert leader == ["ssd-jax", *COMMAND, *flags, "--hosts=127.0.0.1:4000,count=2"]


def parts(script):
    """The worker's command and the leader's, without where they are."""
    found = commands(dry(script, *FLAGS[script], *COMMAND))
    workers = [words for words in found if words[:2] == ["ssd-jax", "draft-worker"]]
    hosts = [words for words in found if words[0].endswith("host.sh")]
    return workers, hosts


@pytest.mark.parametrize("address", ["fd00::7", "[fd00::7]"])
def test_a_worker_may_have_an_address_of_ipv6(address):
    flags = [*FLAGS["tpu_vm/run.sh"], f"--draft_address={address}", "--setup="]
    found = dry("tpu_vm/run.sh", *flags, *COMMAND).replace("\\", "")
    assert "--listen=[fd00::7]:4711" in found
    assert "--draft_placement=remote:[fd00::7]:4711" in found
    assert "--command=true && " in found


@pytest.mark.parametrize("script", ["slurm/run.sh", "tpu_vm/run.sh"])
def test_clusters_run_what_local_processes_run(script):
    """A worker with TLS, and hosts by JAX's own detection."""
    (worker,), hosts = parts(script)
    assert {"--draft=hf:o/d", "--target=hf:o/t", "--draft_devices=0-3"} < {*worker}
    assert {word.partition("=")[0] for word in worker[2:]} == {
        *("--listen", "--draft", "--target", "--draft_devices"),
        *("--token_file", "--tls_cert", "--tls_key"),
    }
    for host in hosts:
        at = host.index("generate")
        assert host[at : at + len(COMMAND)] == COMMAND
        names = {word.partition("=")[0] for word in host[at + len(COMMAND) :]}
        assert names == {"--draft", "--draft_placement", "--draft_tls_ca", "--draft_token_file"}
    if script == "tpu_vm/run.sh":
        assert [host[1:3] for host in hosts] == [["1", "auto"], ["0", "auto"]]


def test_slurm_runs_target_and_draft_as_two_steps():
    lines = dry("slurm/run.sh", *FLAGS["slurm/run.sh"], *COMMAND).split("\n")
    submitted, _, secrets, draft, *target = lines
    assert shlex.split(secrets)[0] == str(LAUNCH / "secrets.sh")
    assert {"--nodes=3", "--partition=gpu", "--ntasks-per-node=1"} <= {*shlex.split(submitted)}
    assert {"srun", "--nodes=1", "--relative=2", "--no-kill"} < {*shlex.split(draft)}
    words = shlex.split("\n".join(target))
    assert {"srun", "--nodes=2", "--ntasks=2", "--relative=0", "--kill-on-bad-exit=1"} < {*words}
    assert '"$SLURM_PROCID" auto' in words[words.index("-c") + 1]


def test_setup_runs_first_on_every_node_of_slurm(tmp_path, monkeypatch):
    ran = tmp_path / "ran"
    draft_first = f"until [[ $1 != generate || -e {ran} ]]; do sleep 0.05; done"
    stand_ins(
        tmp_path,
        monkeypatch,
        srun='while [[ $1 == --* ]]; do shift; done; SLURM_PROCID=0 exec "$@"',
        scontrol="echo localhost",
        ssd_jax=f'{draft_first}; echo "$SEEN $1" >>{ran}',
    )
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-3]")
    flags = [f"--job={LAUNCH}", f"--directory={tmp_path}/s", "--setup=SEEN='a b' && export SEEN"]
    found = run("slurm/run.sh", *flags, *FLAGS["slurm/run.sh"], *COMMAND)
    assert found.returncode == 0, found.stderr
    assert ran.read_text().splitlines() == ["a b draft-worker", "a b generate"]


@pytest.fixture(params=["tpu", "gpu", "alone", "volume", "bucket"])
def manifest(request):
    yaml = pytest.importorskip("yaml")
    on_tpus = FLAGS["gke/run.sh"]
    flags = {
        "tpu": on_tpus,
        "gpu": ON_GPUS,
        "alone": [flag for flag in ON_GPUS if not flag.startswith("--draft")],
        "volume": [*on_tpus, *ON_A_VOLUME],
        "bucket": [*ON_GPUS, *ON_A_BUCKET],
    }[request.param]
    return request.param, yaml.safe_load(dry("gke/run.sh", *flags, *COMMAND))


def test_a_manifest_is_what_its_published_schemas_want(manifest):
    validate = pytest.importorskip("kubernetes_validate")
    models = pytest.importorskip("kubeflow_trainer_api.models")
    _, found = manifest
    same = models.JobsetV1alpha2JobSet.from_dict(found)
    known = same.to_dict()
    assert known["spec"].keys() == found["spec"].keys()
    for made, published in zip(found["spec"]["replicatedJobs"], known["spec"]["replicatedJobs"],
                            strict=True):  # fmt: skip
        assert made == {key: published[key] for key in made}
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}}
        validate.validate(job | {"spec": made["template"]["spec"]}, "1.33", strict=True)
    for key in ("network", "failurePolicy", "successPolicy"):
        assert known["spec"][key].items() >= found["spec"][key].items()


def test_a_manifest_with_a_field_that_is_none_is_seen(manifest):
    validate = pytest.importorskip("kubernetes_validate")
    _, found = manifest
    spec = found["spec"]["replicatedJobs"][0]["template"]["spec"]
    spec["template"]["spec"]["containers"][0]["comand"] = ["typo"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": spec}
    with pytest.raises(validate.ValidationError):
        validate.validate(job, "1.33", strict=True)


def test_only_the_draft_is_started_again(manifest):
    where, found = manifest
    jobs = {job["name"]: job["template"]["spec"] for job in found["spec"]["replicatedJobs"]}
    assert [*jobs] == (["target"] if where == "alone" else ["target", "draft"])
    assert jobs["target"]["backoffLimit"] == 0
    assert jobs["target"]["template"]["spec"]["restartPolicy"] == "Never"
    assert found["spec"]["failurePolicy"] == {"maxRestarts": 0}
    assert found["spec"]["successPolicy"]["targetReplicatedJobs"] == ["target"]
    if where != "alone":
        assert jobs["draft"]["backoffLimit"] > 10**5
        assert jobs["draft"]["template"]["spec"]["restartPolicy"] == "OnFailure"


def test_pods_run_what_local_processes_run(manifest):
    where, found = manifest
    pods = {
        job["name"]: job["template"]["spec"]["template"]["spec"]["containers"][0]
        for job in found["spec"]["replicatedJobs"]
    }
    shell, flag, line, _, hosts, *command = map(expanded, pods["target"]["command"])
    assert (shell, flag) == ("bash", "-c")
    store = STORE if where == "volume" else []
    words = " ".join(["exec launch/host.sh", *store, '"$JOB_COMPLETION_INDEX" "$@"'])
    assert line.endswith(words)
    on_tpus = where in ("tpu", "volume")
    assert hosts == ("auto" if on_tpus else "ssd-target-0-0.ssd:4000,count=2")
    assert command[: len(COMMAND)] == COMMAND
    if where != "alone":
        assert "--draft_placement=remote:ssd-draft-0-0.ssd:4711" in command
        assert pods["draft"]["command"][:3] == ["ssd-jax", "draft-worker", "--listen=0.0.0.0:4711"]
        assert pods["draft"]["command"][-len(STORE) :] == STORE or not store


def test_words_of_a_command_stay_what_they_are():
    yaml = pytest.importorskip("yaml")
    hard = ["generate", '--prompt=a "b"\n\tc\\ $HOME: {d}\r $$x^2$$ $(JOB_COMPLETION_INDEX) $$(c)']
    found = yaml.safe_load(dry("gke/run.sh", *ON_GPUS, *hard))
    pod = found["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert [*map(expanded, pod["containers"][0]["command"][5:7])] == hard


def test_pods_have_a_token_and_a_volume_where_they_are_named(manifest):
    where, found = manifest
    answers = r"[[ $JOB_COMPLETION_INDEX != 0 ]] || exec >/data/a\ b.jsonl; exec launch/"
    for job in found["spec"]["replicatedJobs"]:
        template = job["template"]["spec"]["template"]
        pod = template["spec"]
        (container,) = pod["containers"]
        mounted = {mount["name"]: mount["mountPath"] for mount in container.get("volumeMounts", [])}
        volumes = {volume["name"]: volume for volume in pod.get("volumes", [])}
        assert mounted.keys() == volumes.keys()
        assert mounted.get("data") == ("/data" if where in ("volume", "bucket") else None)
        names = [variable["name"] for variable in container.get("env", [])]
        assert names == (["HF_HOME", "HF_TOKEN"] if where == "volume" else [])
        if where == "volume":
            assert volumes["data"]["persistentVolumeClaim"] == {"claimName": "claim"}
            assert volumes["programs"]["secret"] == {"secretName": "hmac", "defaultMode": 0o400}
            assert mounted["programs"] == "/programs"
        if where == "bucket":
            assert volumes["data"]["csi"]["volumeAttributes"]["bucketName"] == "b"
            assert template["metadata"]["annotations"] == {"gke-gcsfuse/volumes": "true"}
            assert pod["serviceAccountName"] == "reader"
        if job["name"] == "target":
            assert expanded(container["command"][2]).startswith(answers) == (where == "volume")


def expanded(word):
    """What Kubernetes makes of a word, in a pod where every variable is 0."""
    return re.sub(r"\$(?:(\$)|\(\w+\))", lambda found: found[1] or "0", word)


def test_secrets_are_the_owners_and_stay(tmp_path):
    for _ in range(2):
        made = run("secrets.sh", str(tmp_path / "s"), "ssd-draft-0-0.ssd")
        assert made.returncode == 0, made.stderr
    files = {path.name: path for path in (tmp_path / "s").iterdir()}
    assert {*files} == {"token", "worker.key", "worker.pem"}
    assert {path.stat().st_mode & 0o77 for path in files.values()} == {0}
    assert "DNS:ssd-draft-0-0.ssd" in named(files["worker.pem"])


def named(certificate):
    shown = ["openssl", "x509", "-in", certificate, "-noout", "-ext", "subjectAltName"]
    return subprocess.run(shown, capture_output=True, text=True, check=True).stdout


def test_a_certificate_for_another_host_or_near_its_end_is_made_anew(tmp_path):
    """The same directory has a job of SLURM's on one node, then on another; the token stays."""
    certificate = tmp_path / "worker.pem"
    made = []
    for host in ("node17", "node17", "node1"):
        assert run("secrets.sh", tmp_path, host).returncode == 0
        assert host in named(certificate)
        made.append((certificate.read_text(), (tmp_path / "token").read_text()))
    assert made[0] == made[1]
    assert len({text for text, _ in made}) == 2
    assert len({token for _, token in made}) == 1
    subprocess.run(
        ["openssl", "req", "-x509", "-key", tmp_path / "worker.key", "-days", "6", "-subj", "/CN=x",
         "-addext", "subjectAltName=DNS:node1", "-out", certificate],
        capture_output=True, check=True,
    )  # fmt: skip
    ending = certificate.read_text()
    assert run("secrets.sh", tmp_path, "node1").returncode == 0
    assert certificate.read_text() != ending


def test_names_that_openssl_refuses_are_named_in_one_line_and_leave_nothing(tmp_path):
    found = run("secrets.sh", tmp_path, "10.0.0.300")
    assert found.returncode == 2
    assert found.stderr.startswith(
        "launch/secrets.sh: openssl makes no certificate for IP:10.0.0.300"
    )
    assert found.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Starts a script that starts stand-ins; those of the draft worker, and of the target's leader
    if it is to run, leave the files NAME-started, and at SIGTERM NAME-ended. The worker first reads
    its input to the end: that of the script is the leader's."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-3]")

    def start(script, target, **how):
        def role(name):
            end = f"trap 'touch {tmp_path}/{name}-ended; exit' TERM"
            # Not `touch`: bash forgets a Ctrl-C that comes while a child is ending well.
            return f"{end}; : >{tmp_path}/{name}-started; sleep 600 & wait"

        wait = f"until [[ -e {tmp_path}/draft-started ]]; do sleep 0.05; done"
        of_target = f"{wait}; {role('target')}" if target else wait
        for program in ("gcloud", "srun"):
            (tmp_path / program).write_text(
                "#!/bin/bash\n"
                f'if [[ "$*" == *draft-worker* ]]; then cat; {role("draft")}; fi\n'
                f'if [[ "$*" == *"host.sh "[0g]* ]]; then {of_target}; fi\n'
            )
            (tmp_path / program).chmod(0o755)
        (tmp_path / "scontrol").write_text("#!/bin/bash\necho localhost\n")
        (tmp_path / "scontrol").chmod(0o755)
        flags = [f"--job={LAUNCH}", f"--directory={tmp_path}/s"] if "slurm" in script else []
        how = {"stdin": subprocess.PIPE} | how
        return subprocess.Popen([LAUNCH / script, *flags, *FLAGS[script], *COMMAND], **how)

    return start


@pytest.mark.parametrize("script", ["tpu_vm/run.sh", "slurm/run.sh"])
def test_a_script_ends_its_draft_worker_with_itself(started, script, tmp_path):
    assert started(script, target=False).wait(120) == 0
    eventually((tmp_path / "draft-ended").exists)


@pytest.mark.parametrize("script", ["tpu_vm/run.sh", "slurm/run.sh"])
def test_a_leader_that_dies_of_ctrl_c_takes_the_draft_worker_with_it(started, script, tmp_path):
    leader, follower = pty.openpty()

    def take_terminal():
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    streams = dict.fromkeys(("stdin", "stdout", "stderr"), follower)
    running = started(script, target=True, preexec_fn=take_terminal, **streams)
    os.close(follower)
    eventually((tmp_path / "target-started").exists)
    os.write(leader, b"\x03")
    eventually((tmp_path / "draft-ended").exists)
    assert running.wait(120) in (130, -signal.SIGINT)
    os.close(leader)


@pytest.mark.parametrize("script", ["tpu_vm/run.sh", "slurm/run.sh"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_script_that_is_ended_ends_all_that_it_started(started, script, number, tmp_path):
    usual = functools.partial(signal.signal, number, signal.SIG_DFL)  # nohup has it ignored
    running = started(script, target=True, preexec_fn=usual)
    eventually((tmp_path / "target-started").exists)
    running.send_signal(number)
    for name in ("draft", "target"):
        eventually((tmp_path / f"{name}-ended").exists)
    assert running.wait(120) == -number

"""Settings: where a value comes from, and what is said about one that is wrong."""

from __future__ import annotations

import json
import os
import pickle
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from ckpipe.errors import SettingsError
from ckpipe.retention import KeepBest, KeepEvery, KeepIf, KeepLast, KeepWithin
from ckpipe.settings import (
    Load,
    Lock,
    Retention,
    Settings,
    Staging,
    Upload,
)
from tests.support.command_line import forked_anew

MIB = 1024 * 1024


@pytest.fixture(autouse=True)
def no_settings_in_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("CKPIPE_")]:
        monkeypatch.delenv(name)


def test_keyword_wins_over_environment_over_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPIPE_UPLOAD__LANES", "8")
    monkeypatch.setenv("CKPIPE_UPLOAD__RETRIES", "2")
    settings = Settings(upload={"lanes": 3})
    assert (settings.upload.lanes, settings.upload.retries) == (3, 2)
    assert settings.upload.backoff_seconds == Upload().backoff_seconds


def test_file_is_below_environment_and_overrides(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CKPIPE_ON_BUSY", "skip")
    file = tmp_path / "ckpipe.toml"
    file.write_text(
        """
        on_busy = "fail"
        on_error = "warn"
        keep_last = 5
        staging_bytes = "1 GiB"
        [upload]
        lanes = 9
        retries = 1
        [[retention.rules]]
        keep = "every"
        steps = 1000
        [[retention.rules]]
        keep = "best"
        metric = "loss"
        [backends.file]
        direct = false
        """
    )
    settings = Settings.from_file(file, upload={"lanes": 2}, keep_last=3)
    assert (settings.on_busy, settings.on_error) == ("skip", "warn")
    assert (settings.upload.lanes, settings.upload.retries) == (2, 1)
    assert settings.staging.bytes == 1024 * MIB
    assert settings.retention.rule == KeepLast(3) | KeepEvery(steps=1000) | KeepBest("loss")
    assert settings.backends == {"file": {"direct": False}}


def test_environment_holds_every_kind_of_value(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {
        "URL": "s3://bucket/[run]",
        "SOLO": "true",
        "STAGING_BYTES": "256MiB",
        "KEEP_LAST": "3",
        "RETENTION__RULES": '{"keep": "within", "seconds": 60}',
        "UPLOAD": '{"lanes": 7, "retries": 1}',
        "UPLOAD__RETRIES": "2",
        "UPLOAD__DEADLINE_SECONDS": "",
        "BACKENDS__FILE__DIRECT": "false",
        "BACKENDS__S3__REGION": "eu-west-1",
        "BACKENDS__S3__PARTS": "12",
        "BACKENDS__S3__ODD": "NaN",
        "TEST_ALL": "1",
        "NATIVE": "0",
    }.items():
        monkeypatch.setenv(f"CKPIPE_{name}", text)
    settings = Settings()
    assert settings.url == "s3://bucket/[run]"
    assert settings.solo is True
    assert settings.staging.bytes == 256 * MIB
    assert settings.retention.rule == KeepLast(3) | KeepWithin(timedelta(seconds=60))
    assert settings.upload == Upload(lanes=7, retries=2, deadline_seconds=None)
    assert settings.backends == {
        "file": {"direct": False},
        "s3": {"region": "eu-west-1", "parts": 12, "odd": "NaN"},
    }


def test_rule_of_a_keyword_replaces_that_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CKPIPE_RETENTION__RULES", '{"keep": "every", "steps": 5}')
    assert Settings().retention.rule == KeepEvery(steps=5)
    assert Settings(retention={"rules": {"keep": "last", "n": 1}}).retention.rule == KeepLast(1)
    assert Settings(retention=KeepBest("loss")).retention.rule == KeepBest("loss")


def test_group_given_as_its_class_sets_only_what_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPIPE_STAGING__OVERLAP", "no")
    settings = Settings(staging=Staging(bytes=64 * MIB))
    assert (settings.staging.bytes, settings.staging.overlap) == (64 * MIB, False)


def test_shorthands_are_the_settings_they_name() -> None:
    short = Settings(staging_bytes=64 * MIB, keep_last=2)
    assert short == Settings(staging={"bytes": "64MiB"}, retention={"keep_last": 2})


def test_override_changes_what_is_named_and_keeps_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rule = KeepIf(lambda each: each.step > 3)
    before = Settings(upload={"lanes": 3, "retries": 9}, retention=rule)
    monkeypatch.setenv("CKPIPE_UPLOAD__RETRIES", "1")
    after = before.override(upload={"lanes": 2}, on_busy="skip")
    assert (after.upload.lanes, after.upload.retries, after.on_busy) == (2, 9, "skip")
    assert after.retention.rule == rule
    assert (before.upload.lanes, before.on_busy) == (3, "wait")
    with pytest.raises(SettingsError, match="'on_bus' does not exist"):
        before.override(on_bus="skip")  # type: ignore[call-arg]


def test_settings_are_frozen() -> None:
    settings = Settings()
    with pytest.raises(ValidationError, match="frozen"):
        settings.url = "elsewhere"  # type: ignore[misc]
    with pytest.raises(ValidationError, match="frozen"):
        settings.upload.lanes = 2  # type: ignore[misc]


def test_settings_cross_process_boundaries() -> None:
    settings = Settings(url="/a", keep_last=2, retention={"rules": KeepBest("x") & KeepLast(9)})
    assert Settings(**settings.model_dump()) == settings
    assert pickle.loads(pickle.dumps(settings)) == settings
    assert Settings(**json.loads(settings.model_dump_json())) == settings


@pytest.mark.parametrize(
    ("retention", "rule"),
    [
        (Retention(), None),
        (Retention(keep_last=0), KeepLast(0)),
        (Retention(keep_last=4), KeepLast(4)),
        (Retention(rules=KeepBest("a")), KeepBest("a")),
        (Retention(keep_last=1, rules=KeepBest("a")), KeepLast(1) | KeepBest("a")),
    ],
)
def test_keep_last_and_rules_are_one_rule(retention: Retention, rule: Any) -> None:
    assert retention.rule == rule


@pytest.mark.parametrize(
    ("text", "replicated"),
    [("auto", "auto"), ("none", "none"), ('["ema.*", "step"]', ("ema.*", "step")), ("[]", ())],
)
def test_replicated_is_a_word_or_a_list_of_globs(
    text: str, replicated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPIPE_PLAN__REPLICATED", text)
    assert Settings().plan.replicated == replicated
    monkeypatch.setenv("CKPIPE_PLAN__REPLICATED", "some")
    with pytest.raises(SettingsError, match=r"'plan\.replicated'.*'auto' or 'none'"):
        Settings()


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("67108864", 64 * MIB),
        ("64MiB", 64 * MIB),
        (" 64 mib ", 64 * MIB),
        ("1.5 GiB", 1536 * MIB),
        ("0.1 GB", 100_000_000),
        ("2TB", 2_000_000_000_000),
        ("65536 kB", 65_536_000),
        ("67108864 B", 64 * MIB),
        ("4G", 4_000_000_000),
        ("64Mi", 64 * MIB),
    ],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert Settings(staging_bytes=text).staging.bytes == size


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lanes": 8}, "'lanes' does not exist. The nearest valid name is 'upload.lanes'"),
        ({"uploads": {"lanes": 8}}, "'uploads' does not exist. The nearest valid name is 'upload'"),
        (
            {"load": {"lans": 1}},
            "'load.lans' does not exist. The nearest valid name is 'load.lanes'",
        ),
        ({"keep_lst": 1}, "nearest valid name is 'keep_last'"),
        ({"staging_byte": 1}, "nearest valid name is 'staging_bytes'"),
        ({"drain_timeout": 1}, "nearest valid name is 'drain_timeout_seconds'"),
        ({"timeout": 1}, "nearest valid name is '(plan|lock).timeout_seconds'"),
        ({"upload_lanes": 1}, "nearest valid name is 'upload.lanes'"),
        ({"frobnicate": 1}, r"does not exist. help\(ckpipe.Settings\) names all of them"),
        ({"max_to_keep": 1}, "Here it is called keep_last"),
        ({"keep_latest_k": 1}, "Here it is called keep_last"),
        ({"save_interval_steps": 1}, "Here it is called save_every_steps"),
        ({"async_mode": "async"}, r"Here it is called save\(..., until=...\)"),
        ({"async_save": True}, r"Here it is called save\(..., until=...\)"),
        ({"keep_period": 1}, r"Here it is called retention=KeepEvery\(steps=...\)"),
        ({"best_fn": max}, r"Here it is called retention=KeepBest\(metric\)"),
        ({"on_busy": "queue"}, "'on_busy' is not valid: input should be 'wait', 'skip' or 'fail'"),
        ({"attempt_id": ""}, "'attempt_id' is not valid"),
        (
            {"upload": {"lanes": 0}},
            "'upload.lanes' is not valid.*greater than or equal to 1, not 0",
        ),
        ({"upload": {"retries": -1}}, "'upload.retries'"),
        ({"upload": {"backoff_seconds": 30}}, "must not be less than backoff_seconds"),
        ({"lock": {"timeout_seconds": float("nan")}}, "'lock.timeout_seconds'.*not nan"),
        ({"staging": {"block_bytes": 70_000}}, "multiple of 4096"),
        ({"staging": {"block_bytes": 4096}}, "greater than or equal to 65536"),
        ({"staging_bytes": "1MiB"}, "must hold at least one block"),
        ({"staging_bytes": "12 pounds"}, "'staging.bytes' is not valid: a size is a number with"),
        ({"staging_bytes": "-5"}, "a size is a number"),
        ({"staging_bytes": "0.3 B"}, "whole number of bytes"),
        ({"staging_bytes": 1, "staging": {"bytes": 1}}, "the same setting; give one of them"),
        ({"keep_last": 1, "retention": [1]}, "the same setting"),
        ({"keep_last": -1}, "'retention.keep_last' is not valid"),
        ({"keep_last": 0, "retention": KeepLast(1)}, "no intermediate checkpoints"),
        ({"retention": {"rules": {"keep": "lst"}}}, "'retention.rules' is not valid: .*not 'lst'"),
        ({"retention": {"rules": {"keep": "last"}}}, "needs 'n'"),
        ({"load": 3}, "'load' is not valid"),
    ],
)
def test_wrong_settings_are_refused_and_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        Settings(**fields)


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(SettingsError) as caught:
        Settings(upload={"lans": 3, "retries": -1}, solo="perhaps")  # type: ignore[arg-type]
    text = str(caught.value)
    assert all(name in text for name in ("'upload.lans'", "'upload.retries'", "'solo'"))
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("CKPIPE_LANES", "3", r"\(from CKPIPE_LANES\) does not exist.*CKPIPE_UPLOAD__LANES"),
        ("CKPIPE_UPLOAD_LANES", "3", r"nearest valid name is CKPIPE_UPLOAD__LANES"),
        ("CKPIPE_UPLOAD__LANS", "3", r"\(from CKPIPE_UPLOAD__LANS\) does not exist"),
        (
            "CKPIPE_UPLOAD__LANES",
            "many",
            r"'upload.lanes' \(from CKPIPE_UPLOAD__LANES\) is not valid",
        ),
        ("CKPIPE_UPLOAD", "{", "'upload'.*is not valid"),
    ],
)
def test_wrong_variables_are_refused_and_named(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str, message: str
) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(SettingsError, match=message):
        Settings()


def test_a_table_of_a_larger_file(tmp_path: Path) -> None:
    file = tmp_path / "pyproject.toml"
    file.write_text("[project]\nname = 'x'\n[tool.ckpipe]\nkeep_last = 4\nupload.lanes = 2\n")
    settings = Settings.from_file(file, table="tool.ckpipe", keep_last=5)
    assert (settings.keep_last, settings.upload.lanes) == (5, 2)
    with pytest.raises(SettingsError, match=r"no table \[tool.other\]"):
        Settings.from_file(file, table="tool.other")


def test_variable_below_a_setting_that_is_no_group_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CKPIPE_URL", "/here")
    monkeypatch.setenv("CKPIPE_URL__HOST", "there")
    with pytest.raises(SettingsError, match="CKPIPE_URL__HOST goes into url"):
        Settings()


@pytest.mark.parametrize("backends", [{"s3": "hush"}, {"s3": {1: "hush"}}, {"s3": ["hush"]}])
def test_backend_options_are_never_shown(backends: Any) -> None:
    with pytest.raises(SettingsError, match="'backends") as caught:
        Settings(backends=backends)
    assert "hush" not in str(caught.value)
    assert "hush" not in repr(Settings(backends={"s3": {"secret": "hush"}}))


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"lanes = [", "is not TOML"), (b"\xff", "is not TOML"), (b"lanes = 3", "'upload.lanes'")],
)
def test_wrong_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "ckpipe.toml"
    file.write_bytes(content)
    with pytest.raises(SettingsError, match=message):
        Settings.from_file(file)


def test_absent_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be read"):
        Settings.from_file(tmp_path / "absent.toml")


@pytest.mark.parametrize("model", [Settings, Staging, Upload, Load, Lock, Retention])
def test_every_setting_is_described(model: type[BaseModel]) -> None:
    assert [name for name, info in model.model_fields.items() if not info.description] == []


@pytest.mark.parametrize("use", ["import ckpipe.retention", "import ckpipe; ckpipe.Batches"])
def test_rules_and_batches_do_not_import_pydantic(use: str) -> None:
    done = forked_anew(f"{use}; print('pydantic' in sys.modules)", "pydantic")
    assert done.out == "False\n", done.err

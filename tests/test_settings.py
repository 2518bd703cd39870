"""Settings: one table, five sources, errors that name key, value, origin and the way out."""

from __future__ import annotations

from pathlib import Path

import click.testing
import pytest

from amdvgpud.cli import cli
from amdvgpud.core.errors import Invalid
from amdvgpud.settings import FORMS, SETTINGS, read_settings, shown


def test_the_defaults_are_valid_and_say_so() -> None:
    settings = read_settings({}, {})
    assert settings.rest_tcp == ("127.0.0.1", 9841)
    assert set(settings.origin.values()) == {"default"}
    assert shown(settings)["slices_tmpfs_bytes"] == 256 * 1024**2


def test_the_later_source_wins(tmp_path: Path) -> None:
    file = tmp_path / "amdvgpud.toml"
    file.write_text('tick_s = 3\nrescan_s = 5\nrun_dir = "/a"\n[rest]\ntcp = ""\n')
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "conf.d" / "10.toml").write_text('rescan_s = 6\nrun_dir = "/b"\n')
    settings = read_settings({"AMDVGPUD_RUN_DIR": "/c"}, {"run_dir": "/d"}, file)
    assert (settings.tick_s, settings.rescan_s, str(settings.run_dir), settings.rest_tcp) == (3.0, 6.0, "/d", None)
    assert settings.origin["rescan_s"] == str(tmp_path / "conf.d" / "10.toml")
    assert settings.origin["run_dir"] == "command line --run-dir"


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("tick_s", "0"),
        ("tick_s", "soon"),
        ("tick_s", "nan"),
        ("run_dir", "relative"),
        ("slices_tmpfs_bytes", "16 potatoes"),
        ("rest.socket_mode", "0999"),
        ("rest.tcp", "9841"),
        ("rest.tcp", "127.0.0.1:²"),
        ("rest.tcp_details", "maybe"),
        ("metrics.compat", "nagios"),
        ("max_slices_per_partition", "-1"),
        ("log_level", "loud"),
    ],
)
def test_a_bad_value_is_an_error_that_names_key_value_and_origin(key: str, text: str) -> None:
    with pytest.raises(Invalid) as caught:
        read_settings({SETTINGS[key].variable: text}, {})
    assert key in caught.value.detail
    assert repr(text) in caught.value.detail
    assert SETTINGS[key].variable in caught.value.detail


def test_an_unknown_key_is_an_error_with_the_nearest_known_one(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text("[rest]\ntcp_detail = true\n")
    with pytest.raises(Invalid, match=r"rest\.tcp_detail is no setting .*x\.toml.*did you mean rest\.tcp_details\?"):
        read_settings({}, {}, file)
    with pytest.raises(Invalid, match="did you mean AMDVGPUD_TICK_S"):
        read_settings({"AMDVGPUD_TICKS": "1"}, {})


def test_a_named_file_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=r"absent\.toml cannot be read"):
        read_settings({}, {}, tmp_path / "absent.toml")


def test_every_setting_has_a_meaning_and_a_flag_of_its_own() -> None:
    assert all(s.meaning.endswith((".", ".'")) for s in SETTINGS.values())
    assert len({s.flag for s in SETTINGS.values()}) == len(SETTINGS)


def test_all_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text('tick_s = "soon"\n[rest]\ntcp = 5\ntcp_detail = true\n')
    with pytest.raises(Invalid) as caught:
        read_settings({"AMDVGPUD_TICKS": "1"}, {"log_level": "loud"}, file)
    assert [line.split()[0] for line in caught.value.detail.splitlines()] == [
        "rest.tcp_detail",
        "AMDVGPUD_TICKS",
        "tick_s:",
        "log_level:",
        "rest.tcp:",
    ]


def test_every_form_of_a_value_is_explained() -> None:
    assert {s.form for s in SETTINGS.values()} == set(FORMS)


def run_config(*arguments: str) -> click.testing.Result:
    return click.testing.CliRunner().invoke(cli, [*arguments])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('simulate = "mi999"\n', "there is no model 'mi999'"),
        ('library = "/nonexistent/libamdvgpu.so"\n', "is no file"),
        ('[rest]\ntcp = "0.0.0.0:9841"\n', "no loopback address"),
        ('[cdi]\nkind = "amd.com/gpu"\n', "docker 29.3 and later"),
        ('[cdi]\nversion_limit = "0.3.0"\n', "too low"),
    ],
)
def test_the_check_refuses_what_the_daemon_would_refuse_at_its_start(tmp_path: Path, text: str, reason: str) -> None:
    file = tmp_path / "x.toml"
    file.write_text(text)
    told = run_config("--config", str(file), "config", "check")
    assert isinstance(told.exception, Invalid)
    assert reason in str(told.exception)


def test_the_check_says_what_is_not_at_its_default(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text("tick_s = 3\n")
    told = run_config("--config", str(file), "--rest-tcp", "", "config", "check")
    assert told.output == "The configuration is valid; not at their defaults: tick_s, rest.tcp.\n"


def test_what_is_shown_is_toml_that_reads_back_as_the_same_settings(tmp_path: Path) -> None:
    told = run_config("--tick-s", "3", "--metrics-compat", "hami", "config", "show", "--origin")
    file = tmp_path / "shown.toml"
    file.write_text(told.output)
    assert shown(read_settings({}, {}, file)) == shown(read_settings({}, {"tick_s": "3", "metrics.compat": "hami"}))
    assert "tick_s = 3.0  # command line --tick-s\n" in told.output


def test_partition_targets_are_a_list_or_a_text_with_commas_and_are_checked_at_once(tmp_path: Path) -> None:
    file = tmp_path / "amdvgpud.toml"
    file.write_text('[partition]\ntarget = ["all=CPX", "0000:83:00.0=QPX/NPS4"]\n')
    assert read_settings({}, {}, file).partition_target == ("all=CPX", "0000:83:00.0=QPX/NPS4")
    assert read_settings({"AMDVGPUD_PARTITION_TARGET": "all=cpx, 0=spx"}, {}).partition_target == ("all=cpx", "0=spx")
    assert shown(read_settings({}, {}, file))["partition.target"] == ["all=CPX", "0000:83:00.0=QPX/NPS4"]
    assert read_settings({}, {"partition.target": ""}, file).partition_target == ()
    for text in ("CPX", "all=CPXX", "all=", "all=CPX/4"):
        with pytest.raises(Invalid, match=r"partition\.target"):
            read_settings({}, {"partition.target": text})


@pytest.mark.parametrize(
    ("flags", "refused"),
    [
        (
            {"kubelet.mode": "profiles", "images.policy": "refuse", "kubelet.delivery": "nodes"},
            "images.policy = 'refuse'",
        ),
        ({"kubelet.mode": "hami", "hook.required": "true", "kubelet.delivery": "nodes"}, "hook.required"),
        ({"kubelet.mode": "hami", "hook.required": "true"}, None),  # what auto comes to is known at the start
        ({"kubelet.mode": "hami", "hook.required": "true", "kubelet.delivery": "cdi"}, None),
        ({"kubelet.mode": "whole", "images.policy": "refuse"}, None),
        ({"images.policy": "refuse"}, None),
    ],
)
def test_what_needs_the_hook_is_refused_where_pods_get_none(
    flags: dict[str, str], refused: str | None, tmp_path: Path
) -> None:
    (tmp_path / "amdvgpud.toml").touch()
    if refused is None:
        read_settings({}, flags, tmp_path / "amdvgpud.toml")
        return
    with pytest.raises(Invalid) as error:
        read_settings({}, flags, tmp_path / "amdvgpud.toml")
    assert f"'nodes' brings no hook into pods, which {refused} needs" in error.value.detail


@pytest.mark.parametrize("flags", [{"images.policy": "dmem"}, {"hook.required": "true"}])
def test_what_needs_the_hook_is_refused_where_it_is_off(flags: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "amdvgpud.toml").touch()
    with pytest.raises(Invalid, match=r"hook\.enabled: is off, and .* needs the hook: switch it on"):
        read_settings({}, flags | {"hook.enabled": "false"}, tmp_path / "amdvgpud.toml")


def test_profiles_are_a_table_in_a_file_and_a_text_elsewhere(tmp_path: Path) -> None:
    file = tmp_path / "amdvgpud.toml"
    file.write_text(
        'kubelet.mode = ["profiles"]\n[kubelet.profiles]\n25c-48g = {compute = "25%", vram = "48GiB", count = 4}\n'
    )
    written = read_settings({}, {}, file)
    assert shown(written)["kubelet.profiles"] == ["25c-48g=25%:48GiB:4"]
    told = read_settings({"AMDVGPUD_KUBELET_PROFILES": "25c-48g=25%:48GiB:4"}, {"kubelet.mode": "off"}, file)
    assert (told.kubelet_profiles, told.kubelet_mode) == (written.kubelet_profiles, ())
    with pytest.raises(Invalid, match="'hami' and 'whole' both offer"):
        read_settings({}, {"kubelet.mode": "hami,whole"}, file)

"""Settings: one table, five sources, errors that name key, value, origin and the way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from amdvgpud.core.errors import Invalid
from amdvgpud.settings import SETTINGS, read_settings, shown


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

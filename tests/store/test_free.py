import pytest

from layercast.store.free import memory_free


def written(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("limits", "free"),
    [
        ({}, 1000 << 10),
        ({"memory.max": "max\n", "memory.current": "5\n"}, 1000 << 10),
        ({"memory.max": "9000\n", "memory.current": "5000\n"}, 4000),
        ({"memory.max": "9000", "memory.current": "5000", "memory.stat": "anon 1\ninactive_file 700\n"}, 4700),
        ({"memory/memory.limit_in_bytes": "9000", "memory/memory.usage_in_bytes": "9500"}, 0),
        ({"memory/memory.limit_in_bytes": "9223372036854771712", "memory/memory.usage_in_bytes": "1"}, 1000 << 10),
    ],
)
def test_memory_is_no_more_than_the_container_may_take(tmp_path, limits, free):
    written(tmp_path / "proc/meminfo", "MemTotal: 2000 kB\nMemAvailable:   1000 kB\n")
    for name, text in limits.items():
        written(tmp_path / "sys/fs/cgroup" / name, text)
    assert memory_free(tmp_path) == free
    assert memory_free(tmp_path / "nothing") is None

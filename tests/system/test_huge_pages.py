import threading

import jax
import numpy as np
import pytest

from ssd_jax.system.huge_pages import HugePages


@pytest.mark.parametrize(
    "shape", [(), (1,), (3, 5), (1000, 333), pytest.param((40 << 20,), marks=pytest.mark.more)]
)
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_a_copy_to_huge_pages_is_equal_and_aligned(shape, dtype):
    array = np.ones(shape, dtype)
    copy = HugePages().copy(array)
    np.testing.assert_array_equal(copy, array)
    assert copy.dtype == dtype
    assert copy.ctypes.data % 64 == 0


def test_copies_do_not_overlap():
    pages = HugePages()
    arrays = [np.full(size, size % 251, np.uint8) for size in (5, 64, 65, 1 << 20, 33 << 20, 7)]
    copies = [pages.copy(array) for array in arrays]
    for array, copy in zip(arrays, copies, strict=True):
        np.testing.assert_array_equal(copy, array)


def test_threads_share_huge_pages():
    pages, copies = HugePages(), {}

    def fill(value):
        copies[value] = [pages.copy(np.full(1001, value, np.uint8)) for _ in range(300)]

    threads = [threading.Thread(target=fill, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for value, made in copies.items():
        assert all((copy == value).all() for copy in made)


def test_jax_takes_an_array_of_huge_pages_without_a_copy():
    copy = HugePages().copy(np.ones((300, 7), np.float32))
    assert jax.device_put(copy).unsafe_buffer_pointer() == copy.ctypes.data

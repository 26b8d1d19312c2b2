"""The bindings' own module."""

from tensorrt_bindings.plugin import *  # noqa: F403

"""The lookup on kernels in triton's interpreter; test_device_lookup.py runs this in a process of its own.

TRITON_INTERPRET has to be set before anything imports triton.
"""

from __future__ import annotations

from unittest import mock

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lookup_stories import COLUMNS, Story, check_story, speculations, stories

from trtspec.draft.device import DeviceHistory, DeviceLookup
from trtspec.plugins.kernels import launch, plans


def on_kernels(story: Story) -> DeviceLookup:
    return DeviceLookup(DeviceHistory(story.slots, COLUMNS, torch.device("cpu")), story.max_draft_tokens, launch)


@settings(max_examples=40, deadline=None)
@given(stories(speculations(ngram_max=st.sampled_from([3, 5])), st.integers(0, 9)))
def test_kernels_answer_as_the_host_does(story: Story) -> None:
    # Several tiles and chunks even with little data.
    with mock.patch.object(plans, "TILE", 16), mock.patch.object(plans, "COMPARISONS", 16):
        check_story(story, on_kernels)

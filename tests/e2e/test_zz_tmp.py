import time
import trtspec
def test_tiny(tiny_dir, tiny_hf_dir):
    print(sorted(p.name for p in tiny_hf_dir.iterdir()))
    with trtspec.Session.open(tiny_dir) as s:
        c = s.generate(["hello"], trtspec.SamplingParams(64))
        print(c[0].text, c[0].token_ids)
def test_demo(demo_dir):
    with trtspec.Session.open(demo_dir) as s:
        c = s.generate(["hello"], trtspec.SamplingParams(32))
        print(c[0].text)

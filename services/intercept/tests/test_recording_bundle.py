"""The file of a recording: what is written is read, and no damage makes other data of it."""

import json
import struct
import tracemalloc
import zlib
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wooly.recording import bundle as format
from wooly.recording.bundle import Bundle, BundleError, BundleWriter, Line, Part, RunFrame, WriteFrame
from wooly.recording.record import Recording
from wooly_testkit.assembler import assemble
from wooly_testkit.effort import examples
from wooly_wis.codec import digest, encode_program
from wooly_wis.frames import MAX_CHUNK, pack_run

PROGRAM = encode_program(assemble("wis 1\n%0 u8[8] = alloc\n%0 f32[2] = relu %1 f32[2]\n"))
FACTS = {"wooly": "1", "torch": "2.13.0", "program": "x.py", "data": True, "device": {"name": "d"}}


def here():
    """Two origins in this file."""
    code = here.__code__
    return [(code, 0), (code, 2)]


def recorded(path, uploads=(b"abc", b"defg", b"abc"), *, data=True, end=True):
    """A bundle with uploads, a run with an answer, a source and a read."""
    log = Recording(BundleWriter(path, FACTS | {"data": data}), data=data, say=print)
    for k, content in enumerate(uploads):
        log.wrote(8 + k, 0, memoryview(content))
    log.source(b"a kernel")
    log.defined(PROGRAM)
    log.ran(pack_run(digest(PROGRAM), [80, 8], b"", [8], reply=True), here())(bytes(32))
    log.asked(80, 0, 8)(bytes(range(32)))
    log.failed(log.frames)
    if end:
        log.end()
    return path


def content_of(bundle):
    """All that a bundle says about its frames."""
    found = []
    for frame in bundle.all_frames():
        more = bundle.content(frame) if isinstance(frame, WriteFrame) and bundle.has_data else None
        raw = bundle.program(frame.program) if isinstance(frame, RunFrame) else None
        found.append((frame, more, raw, bundle.lines_of(frame), list(bundle.sources(frame.number))))
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The bytes of a bundle, what it says, and a path for damaged copies."""
    path = recorded(tmp_path_factory.mktemp("bundle") / "b")
    with Bundle(path) as bundle:
        return path.read_bytes(), content_of(bundle), dict(bundle.answers), path.with_name("damaged")


def test_a_bundle_has_what_was_recorded(tmp_path):
    with Bundle(recorded(tmp_path / "b")) as bundle:
        assert (bundle.frames, bundle.complete, bundle.dropped, bundle.has_data) == (5, True, 0, True)
        frames = list(bundle.all_frames())
        assert [bundle.content(f) for f in frames[:3]] == [b"abc", b"defg", b"abc"]
        run = frames[3]
        assert (run.run.bindings, run.run.frees, run.run.reply) == ([80, 8], [8], True)
        assert bundle.program(run.program) == PROGRAM
        assert [(line.file, line.function) for line in bundle.lines_of(run)] == [(__file__, "here")] * 2
        assert list(bundle.sources(4)) == [b"a kernel"] and not list(bundle.sources(3))
        assert bundle.answers == {4: bytes(32), 5: bytes(range(32))} and bundle.failed == {5}
        assert (bundle.written, bundle.kept) == (10, 7)  # equal uploads once


def test_without_data_neither_contents_nor_digests_are_in_the_file(tmp_path):
    path = recorded(tmp_path / "b", [b"a secret content"], data=False)
    raw = path.read_bytes()
    assert b"secret" not in raw and format.chunk_digest(b"a secret content") not in raw
    with Bundle(path) as bundle:
        assert bundle.counts[Part.CONTENT] == 0 and bundle.answers == {} and bundle.frame(1).nbytes == 16


@given(st.data())
@settings(max_examples=examples(40, 150))
def test_a_truncated_bundle_is_a_prefix_or_an_error(whole, data):
    raw, said, answers, path = whole
    size = data.draw(st.integers(0, len(raw) - 1))
    path.write_bytes(raw[:size])
    try:
        with Bundle(path) as bundle:
            assert content_of(bundle) == said[: bundle.frames]
            assert bundle.answers.items() <= answers.items()
            assert not bundle.complete
    except BundleError as e:
        assert "is no bundle" in str(e) or "is empty" in str(e)


@given(st.data())
@settings(max_examples=examples(80, 300))
def test_a_changed_byte_is_an_error_or_a_prefix(whole, data):
    raw, said, answers, path = whole
    changed = bytearray(raw)
    changed[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(changed)
    try:
        with Bundle(path) as bundle:
            assert content_of(bundle) == said[: bundle.frames]
            assert bundle.answers.items() <= answers.items()
    except BundleError as e:
        assert str(path) in str(e)


@given(st.binary(max_size=400))
def test_bytes_that_are_no_bundle_are_an_error(whole, data):
    path = whole[3]
    for start in (b"", struct.pack("<8sI", format.MAGIC, format.VERSION)):
        path.write_bytes(start + data)
        with pytest.raises(BundleError):
            Bundle(path)


def test_another_version_names_both_versions(whole):
    raw, *_, path = whole
    path.write_bytes(raw[:8] + struct.pack("<I", 7) + raw[12:])
    with pytest.raises(
        BundleError, match="format 7, and this release of Wooly reads format 1; replay it with the release"
    ):
        Bundle(path)


def test_a_bundle_that_does_not_exist_is_an_error(tmp_path):
    with pytest.raises(BundleError, match="cannot read the bundle"):
        Bundle(tmp_path / "nothing")


def forged(path, *records, facts=FACTS):
    """A file with correct checksums and these records."""
    writer = BundleWriter(path, facts)
    for kind, payload in records:
        writer.add(kind, payload)
    writer.close()
    return path


LINE = (Part.LINE, format.line_record(Line("x.py", 1, "f")))
ORIGINS = (Part.ORIGINS, format.origins_record(array("I", [0, 0])))
RUN = format.run_frame(0, 0) + pack_run(digest(PROGRAM), [80, 8], b"", [])


@pytest.mark.parametrize(
    ("records", "why"),
    [
        ([(Part.RUN, RUN)], "names a program or lines that the bundle does not have"),
        ([LINE, (Part.PROGRAM, b"other"), ORIGINS, (Part.RUN, RUN)], "names another program than its digest"),
        ([LINE, ORIGINS, (Part.PROGRAM, PROGRAM), (Part.RUN, RUN[:-3])], "RUN frame"),
        ([(Part.READ, format.read_frame(8, 0, 4, 0))], "names a Python line"),
        ([LINE, (Part.WRITE, format.write_frame(8, 0, 4, 0, bytes(range(32))))], "names a content that"),
        ([LINE, (Part.WRITE, format.write_frame(8, 0, 4, 0, b""))], "has no content"),
        ([LINE, (Part.WRITE, format.write_frame(8, 0, MAX_CHUNK + 1, 0, b""))], "the limit is"),
        ([(Part.LINE, b'["x.py", -1, "f"]')], "a Python line is not valid"),
        ([(Part.LINE, b'["x.py"]')], "damaged"),
        ([(Part.LINE, b"[" * 100_000)], "nested too deeply"),
        ([(Part.ORIGINS, b"\0\0\0\0")], "lines of a program"),
        ([(Part.CONTENT, b"short")], "has no digest"),
        ([(Part.ANSWER, format.answer_record(1, bytes(32)))], "answer to a frame that does not exist"),
        ([(Part.ANSWER, format.answer_record(1, b"good"))], "neither a digest nor an error"),
        ([(Part.FACTS, b"{}")], "out of place"),
        ([(Part.END, b""), LINE], "out of place"),
    ],
)
def test_a_forged_record_is_an_error(tmp_path, records, why):
    with pytest.raises(BundleError, match=why):
        Bundle(forged(tmp_path / "b", *records))


def test_a_content_with_another_digest_is_not_returned(tmp_path):
    name = bytes(range(32))
    records = [LINE, (Part.CONTENT, name + b"abc"), (Part.WRITE, format.write_frame(8, 0, 3, 0, name))]
    with Bundle(forged(tmp_path / "b", *records)) as bundle, pytest.raises(BundleError, match="is another one"):
        bundle.content(bundle.frame(1))


def test_a_record_that_says_that_it_is_large_is_not_read(tmp_path):
    path = forged(tmp_path / "b")
    head = struct.pack("<III", 0xFFFFFFF0, Part.PROGRAM, 0)
    path.write_bytes(path.read_bytes() + head + struct.pack("<I", zlib.crc32(head)))
    with pytest.raises(BundleError, match="4294967280 bytes"):
        Bundle(path)


def test_control_characters_do_not_reach_the_terminal(tmp_path):
    line = (Part.LINE, json.dumps(["\x1b[2Jx.py", 3, "f\n"]).encode())
    with Bundle(forged(tmp_path / "b", line, facts={"program": "\x1b[2J", "device": {"name": "\x07"}})) as bundle:
        assert bundle.lines == [Line("?[2Jx.py", 3, "f?")]
        assert bundle.facts == {"program": "?[2J", "device": {"name": "?"}}


def test_a_file_that_is_no_bundle_is_not_replaced(tmp_path):
    (tmp_path / "train.py").write_text("print(1)")
    with pytest.raises(BundleError, match="is no bundle, so it is not replaced"):
        BundleWriter(tmp_path / "train.py", FACTS)
    assert (tmp_path / "train.py").read_text() == "print(1)"
    recorded(tmp_path / "b")
    recorded(tmp_path / "b", [b"other"])
    with Bundle(tmp_path / "b") as bundle:
        assert bundle.content(bundle.frame(1)) == b"other"


def test_a_full_disk_ends_the_recording_and_not_the_script(tmp_path, monkeypatch):
    said = []
    writer = BundleWriter(tmp_path / "b", FACTS)
    log = Recording(writer, data=True, say=said.append)
    log.wrote(8, 0, memoryview(b"abc"))

    def full(data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer, "_write", full)
    log.wrote(8, 0, memoryview(b"def"))
    log.wrote(8, 0, memoryview(b"ghi"))
    log.end()
    assert len(said) == 1 and "No space left" in said[0] and "the script goes on" in said[0]
    with Bundle(tmp_path / "b") as bundle:
        assert bundle.frames == 1 and not bundle.complete


def test_memory_does_not_grow_with_the_uploads(tmp_path):
    """Each upload comes in pieces of at most 4 MiB; neither writing nor reading keeps them."""
    pieces = [bytes([k]) * MAX_CHUNK for k in range(8)]
    tracemalloc.start()
    try:
        path = recorded(tmp_path / "b", pieces)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
        tracemalloc.reset_peak()
        with Bundle(path) as bundle:
            for frame in bundle.all_frames(last=8):
                assert bundle.content(frame) == pieces[frame.number - 1]
        assert tracemalloc.get_traced_memory()[1] < 4 * MAX_CHUNK
    finally:
        tracemalloc.stop()

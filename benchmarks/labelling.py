"""The page for labellers under load: `python benchmarks/labelling.py [PART ...]`.

    many     twenty labellers at once give 2,000 answers, beside a training on both cores
    large    46,000 questions of 575 tokens: opening, answering, the report, memory

It ends with an error if an answer is lost, doubled or changed. Times are printed and not judged.
Folders are made in a temporary directory; nothing is downloaded.
"""

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path

import startup
from page_client import PATIENCE, ROOT, Client, Server, check

from label_folders import make_folder  # isort: skip (page_client says where it is)
from lm_human_preferences.labels.answers import shown_order
from lm_human_preferences.labels.folder import LabelFolder

LABELLERS = 20
QUERY, RESPONSE = 500, 75  # tokens, as in the summaries of the paper
VOCABULARY = 50257


def percentiles(seconds):
    """The times by which so many of a hundred replies were there, as text."""
    ordered = sorted(seconds)
    at = {share: ordered[round(share * (len(ordered) - 1) / 100)] for share in (50, 90, 99, 100)}
    return ', '.join(f'{share} %: {1000 * value:.1f} ms' for share, value in at.items())


# ---------------------------------------------------------------- many


@contextlib.contextmanager
def training(directory):
    """A training of two ranks, one for each core, which has begun to train its policy."""
    words = ['train_policy', 'mock_sentiment', 'beside', '--mpi', '2', '--save_dir', directory]
    options = ['--run.console', 'original', '--ppo.total_episodes', '100_000_000']
    process = subprocess.Popen(
        [sys.executable, str(ROOT / 'launch.py'), *words, *options],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, 'OMP_NUM_THREADS': '1'},
    )
    assert process.stdout is not None
    try:
        if not any(line.startswith('[ppo_step 0]') for line in process.stdout):
            sys.exit('the training beside did not come to its first step')
        threading.Thread(target=process.stdout.read, daemon=True).start()
        yield
    finally:
        process.terminate()
        process.wait(PATIENCE)


class Sitting(threading.Thread):
    """A labeller who answers until nothing is left. times: seconds of each reply. given: {uuid:
    question} of what was acknowledged. pause: mean seconds of thought."""

    def __init__(self, link, pause):
        super().__init__()
        self.client, self.pause = Client(link), pause
        self.random = random.Random(link)
        self.times, self.given = [], {}

    def run(self):
        queue = self.client.questions()
        while queue:
            question = queue.pop(0)['id']
            time.sleep(self.random.uniform(0, 2 * self.pause))
            key = str(uuid.uuid4())
            started = time.perf_counter()
            status, reply = self.client.answer(question, self.random.randint(1, 4), key)
            self.times.append(time.perf_counter() - started)
            assert status == 200, reply
            self.given[key] = question
            queue += self.client.questions([one['id'] for one in queue], 3 - len(queue))
        self.client.close()


def many(folder, answers, pause, beside=None):
    """Twenty labellers at once. beside: within it something else runs."""
    names = [f'labeller{number}' for number in range(LABELLERS)]
    with beside or contextlib.nullcontext():
        make_folder(folder / 'many', answers)
        server = Server(folder / 'many', names)
        sittings = [Sitting(link, pause) for link in server.links.values()]
        started = time.perf_counter()
        for sitting in sittings:
            sitting.start()
        for sitting in sittings:
            sitting.join()
        seconds = time.perf_counter() - started
        _, complaints = server.end()
    assert not complaints, complaints
    given = {name: sitting.given for name, sitting in zip(names, sittings)}
    found = check(folder / 'many', given)
    assert found == sum(map(len, given.values())) == answers, found
    times = [one for sitting in sittings for one in sitting.times]
    print(f'{LABELLERS} labellers, {found} answers in {seconds:.0f} s: none lost or doubled')
    print(f'replies to an answer, which is on the disk then: {percentiles(times)}')


# ---------------------------------------------------------------- large


def write_answers(path, names, count):
    """Answers of several labellers to the first `count` questions."""
    folder = LabelFolder(str(path))
    rng = random.Random(0)
    (path / 'answers').mkdir(exist_ok=True)
    files = {name: open(path / 'answers' / f'{name}.jsonl', 'w') for name in names}
    for number, question in enumerate(list(folder.questions)[:count]):
        name = names[number % len(names)]
        record = {
            'answer': str(uuid.UUID(int=rng.getrandbits(128), version=4)),
            'question': question,
            'best': rng.randrange(4),
            'order': shown_order(name, question, 4),
            'seconds': 4.5,
            'time': 1.7e9 + number,
        }
        files[name].write(json.dumps(record) + '\n')
    for file in files.values():
        file.close()


def opened(link):
    """(seconds until a page has its first question, its client, the questions)."""
    started = time.perf_counter()
    client = Client(link)
    client.request('GET', '/')
    client.task()
    questions = client.questions()
    return time.perf_counter() - started, client, questions


def large(folder, questions):
    """As many labels as the paper's summaries had; half of them answered, and then all."""
    path = folder / 'large'
    (folder / 'encoding').mkdir()
    startup.write_encoding(folder / 'encoding')
    os.environ['LMHP_GPT2_ENCODINGS'] = str(folder / 'encoding')
    lengths = {'query_length': QUERY, 'response_length': RESPONSE}
    task = {'encoding': 'main', 'task': lengths}
    make_folder(path, questions, task=task, tokens=VOCABULARY)
    size = (path / 'questions.jsonl').stat().st_size / 1e6
    print(f'{questions} questions of {QUERY} and {RESPONSE} tokens, {size:.0f} MB')
    names = [f'labeller{number}' for number in range(LABELLERS)]
    write_answers(path, names, questions // 2)
    server = Server(path, names)
    print(f'the server has started after {server.seconds_to_start:.2f} s')
    pages = [opened(link) for link in server.links.values()]
    times = [seconds for seconds, _, _ in pages]
    print(f'a page has opened after {statistics.median(times):.2f} s, at most {max(times):.2f} s')
    _, client, queue = pages[0]
    replies, refills = [], []
    for number in range(min(500, questions // 4)):
        started = time.perf_counter()
        status, _ = client.answer(queue.pop(0)['id'], number % 4 + 1)
        replies.append(time.perf_counter() - started)
        assert status == 200
        started = time.perf_counter()
        queue += client.questions([one['id'] for one in queue], 1)
        refills.append(time.perf_counter() - started)
    print(f'replies to an answer: {percentiles(replies)}')
    print(f'the next question: {percentiles(refills)}')
    print(f"peak of the server's memory: {server.peak_megabytes():.0f} MB")
    server.end()
    write_answers(path, names, questions)
    started = time.perf_counter()
    report = subprocess.Popen(
        [sys.executable, ROOT / 'launch.py', 'labels', path], stdout=subprocess.DEVNULL
    )
    # RUSAGE_CHILDREN would be the most that any process has used that was started here.
    _, status, usage = os.wait4(report.pid, 0)
    report.returncode = os.waitstatus_to_exitcode(status)
    assert report.returncode == 0
    seconds, peak = time.perf_counter() - started, usage.ru_maxrss / 1024
    print(f'the report on {questions} answers takes {seconds:.1f} s and at most {peak:.0f} MB')


# ---------------------------------------------------------------- all


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('parts', nargs='*', metavar='PART', help='many, large')
    parser.add_argument('--answers', type=int, default=2000)
    parser.add_argument('--pause', type=float, default=0.5, help='mean seconds of thought')
    parser.add_argument('--alone', action='store_true', help='no training beside')
    parser.add_argument('--questions', type=int, default=46_000)
    args = parser.parse_args()
    parts = {
        'many': lambda folder: many(
            folder,
            args.answers,
            args.pause,
            contextlib.nullcontext() if args.alone else training(f'{folder}/save'),
        ),
        'large': lambda folder: large(folder, args.questions),
    }
    unknown = set(args.parts) - parts.keys()
    if unknown:
        parser.error(f'no part {min(unknown)}')
    for part in args.parts or parts:
        with tempfile.TemporaryDirectory() as name:
            parts[part](Path(name))


if __name__ == '__main__':
    main()

"""Folders of runs that a kill, a full disk or somebody's hand has left damaged or half written."""

import json
import random as randoms
import shutil
from functools import partial

from fuzzing import damaged, json_bytes

# What may stand where JSON, or lines of JSON, should: {what: bytes}.
OTHER_CONTENT = {
    'empty': b'',
    'binary': b'\xff\x00\xfe' * 50,
    'a list': b'[]',
    'an empty object': b'{}',
    'null': b'null\n',
    'a number beyond measure': b'{"step": 1e999, "began": NaN, "labels": ' + b'9' * 5000 + b'}',
    'nested deeply': b'[' * 100_000,
    'lines of no meaning': b'3\n"x"\n[[]]\n{"id": 3}\n{"step": []}\n\n{',
}


def damaged_copies(whole, place, count, seed=0):
    """Yield (what was done, path) of `count` copies of the run `whole`, which are made in `place`.

    Each is deleted when the next one is asked for. The same seed gives the same copies.
    """
    random = randoms.Random(seed)
    files = sorted(path.relative_to(whole) for path in whole.rglob('*') if path.is_file())
    each_damaged = list(_each_damaged(files))
    random.shuffle(each_damaged)
    todo = [*_half_written(files), *each_damaged][:count]
    while len(todo) < count:
        todo.append(_at_random(random, random.choice(files)))
    for number, (what, damage) in enumerate(todo):
        copy = place / f'damaged_{number}'
        shutil.copytree(whole, copy)
        damage(copy)
        yield what, copy
        shutil.rmtree(copy, ignore_errors=True)


def _half_written(files):
    """What is left of a run that ended before it had written all of its files."""
    yield 'no file at all', partial(_without, files)
    yield 'only the settings', partial(_without, [each for each in files if _is_not_setting(each)])
    yield 'no settings', partial(_without, [each for each in files if not _is_not_setting(each)])
    yield 'only folders that are empty', partial(_emptied, files)
    for folder in sorted({each.parts[0] for each in files if len(each.parts) > 1}):
        yield f'no {folder}/', lambda run, folder=folder: shutil.rmtree(run / folder)
        yield f'a file in place of {folder}/', partial(_file_for_folder, folder)
    for number in range(1, len(files), 2):
        yield f'only {number} files', partial(_without, files[number:])


def _is_not_setting(path):
    return not path.name.endswith('hparams.json')


def _each_damaged(files):
    """Each file, damaged in each way."""
    for path in files:
        yield f'no {path}', partial(_without, [path])
        yield f'{path} is a folder', partial(_folder_for_file, path)
        yield f'{path} leads nowhere', partial(_link_to_nothing, path)
        yield f'half of {path}', partial(_cut, path)
        yield f'{path} ends in a line of no meaning', partial(_longer, path)
        for what, content in OTHER_CONTENT.items():
            yield f'{path} is {what}', partial(_with_content, path, content)


def _at_random(random, path):
    seed = random.random()
    return f'{path} damaged by {seed}', partial(_changed, path, seed)


def _changed(path, seed, run):
    random = randoms.Random(seed)
    data = (run / path).read_bytes()
    if path.suffix == '.json':
        data = json_bytes(random, json.loads(data))
    elif path.suffix == '.jsonl':
        lines = data.splitlines()
        number = random.randrange(len(lines))
        lines[number] = json_bytes(random, json.loads(lines[number]))
        data = b'\n'.join(lines)
    else:
        data = damaged(random, data)
    (run / path).write_bytes(data)


def _without(paths, run):
    for path in paths:
        (run / path).unlink()


def _emptied(files, run):
    _without(files, run)
    for path in files:
        (run / path.parent).mkdir(parents=True, exist_ok=True)


def _file_for_folder(folder, run):
    shutil.rmtree(run / folder)
    (run / folder).write_text('x')


def _folder_for_file(path, run):
    (run / path).unlink()
    (run / path).mkdir()


def _link_to_nothing(path, run):
    (run / path).unlink()
    (run / path).symlink_to('nowhere')


def _cut(path, run):
    data = (run / path).read_bytes()
    (run / path).write_bytes(data[: len(data) // 2])


def _longer(path, run):
    with (run / path).open('ab') as file:
        file.write(b'{"step": 3, "id": "x", "began": 7, "query"')


def _with_content(path, content, run):
    (run / path).write_bytes(content)

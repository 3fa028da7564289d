"""PPO: proximal policy optimisation on the rewards of sampled answers, with a critic and a KL penalty.

accelerate launch --config_file accelerate_configs/ddp.yaml recipes/ppo.py --config F
python recipes/ppo.py --config recipes/configs/llama3-8b/ppo.yaml --kl_coef 0.1      # the same on one process

`--help` lists every key, `--print-config` shows their values and where each comes from. The same command resumes
a stopped run.
"""

import sys

from recipes_lib.boundary import parse_or_exit, run_command

if __name__ == "__main__":
    CONFIG = parse_or_exit("ppo", sys.argv[1:])  # Before torch is imported: errors appear at once.

from recipes_lib.data.prompts import load_prompt_data
from recipes_lib.models.loading import load_tokenizer
from recipes_lib.publish.final_model import export_model, recipe
from recipes_lib.rl.models import choose_placement, load_actor_critic
from recipes_lib.rl.rewards import load_reward_functions, load_rewards, verify_arguments
from recipes_lib.rl.rollout_schedule import compute_schedule
from recipes_lib.rl.state import CRITIC_FOLDER, build_exporter, save_critic
from recipes_lib.rl.trainer import PolicyTrainer
from recipes_lib.training.run import Run
from recipes_lib.training.trainers.arguments import build_training_arguments
from recipes_lib.training.trainers.trained_model import load_verified_config


@recipe
def main(run: Run) -> None:
    """Train ``config.model`` on sampled answers to the prompts of ``config.data``."""
    config = run.config
    # Prompts.
    tokenizer = load_tokenizer(config.model, config.tokens)
    prompts = load_prompt_data(config, tokenizer, local_rank=run.launch.local_rank)
    load_verified_config(config, tokenizer, prompts.max_length)
    schedule = compute_schedule(len(prompts.train), config, run.launch.world_size)
    run.record(data=prompts.record, answers_per_generation=schedule.answers_per_iteration)
    args = build_training_arguments(config, run.launch, has_eval=True)
    # Before models are loaded: mistakes in reward functions are reported at once.
    functions = load_reward_functions(config.rewards.reward_funcs or [], config.rewards.reward_timeout)
    verify_arguments(functions, prompts.train[0].columns)

    # The reference is the policy at its start; the critic estimates values of tokens.
    models = load_actor_critic(config, args, run.launch, tokenizer, prompts.terminators)
    device, place = str(args.device), choose_placement(args, run.launch)
    rewards = load_rewards(config.rewards, device, models.reward, place, functions)
    trainer = PolicyTrainer(config, args, models, rewards, prompts, tokenizer)
    trainer.train(run.choose_checkpoint())
    export_model(build_exporter(models, args, tokenizer), run.output_dir)
    if config.critic.save_critic:
        save_critic(models.critic, tokenizer, run.output_dir / CRITIC_FOLDER, is_main=run.launch.is_main)


if __name__ == "__main__":
    sys.exit(run_command(lambda: main(CONFIG)))

"""From tasks to scored rollouts: tokenizing, chat, clients of the engines, scheduling."""

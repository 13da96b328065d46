"""The stages of training, and the parts that they share.

mlm, ict, pretrain, adapt, finetune   one file per stage
loop           the training loop: steps, checkpoints, logs, signals
best_weights   the weights that are best on the dev questions
run_config     the settings that all stages share
optimizer      AdamW with one learning rate per part of the model
sharding       weights that are sharded among several processes
checkpoints    checkpoints of a run
metrics        metrics.jsonl and TensorBoard events
health         checks of pre-training: when the retriever is trained, and which index versions are used
examples       questions with their passages and labels, for finetune and the compared systems
span_losses    losses of span readers
trainable      the interface of a model that can be trained
refresh/       rebuilds the index during training
"""
